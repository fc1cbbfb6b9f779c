"""What if a training example had not been there? `data/processed`, `models` → predicted changes of outputs."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import dataclasses
import sys
from pathlib import Path

import numpy as np

from gradtrail.core.gradients.metagradient import compile_metagradient, require_differentiable
from gradtrail.core.gradients.what_if import SMOOTH, WhatIfConfig, make_outputs, positions_of
from gradtrail.core.nn.models import Model
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import on_device
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import what_if
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.model.members import weights_paths
from gradtrail.support.memory import require_memory_for_model
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(WhatIfConfig), stage.params(TrainConfig, "train")
    require_differentiable(train_config)
    info = data_files.read_info(Path("data/processed"))
    splits = data_files.read_splits(Path("data/processed"))
    train, test = splits["train"], splits["test"]
    chosen = positions_of(config.test_examples, test, "what_if.test_examples")
    model = Model(train_config.model_config(info.image_shape, info.num_classes), remat=train_config.remat)

    with tracked(stage) as run, compiling(run) as compiler:
        # The outputs of the trained networks
        margins = what_if.compile_margins(model, test, compiler=compiler)
        predict = margins.predict
        networks = what_if.predict_members(predict, margins, weights_paths(Path("models"), "final"), info, splits)
        train_config = dataclasses.replace(train_config, loss=networks.loss)
        is_mistake = networks.test.argmax(axis=1) != test.labels
        rows = chosen if len(chosen) else what_if.choose_examples(networks.margins, is_mistake, config.num_examples)
        outputs = what_if.output_table(networks, test, rows)

        # Their derivatives by the weights of the training examples, if these predict anything
        output_function = make_outputs(model, test[rows], splits["validation"], train_config.batch_size)
        metagradient = compile_metagradient(
            train_config, model, len(train), output_function, memory_bytes=config.memory_mib * 2**20, compiler=compiler
        )
        functions = [predict.function, margins.log_odds, *metagradient.functions]
        require_memory_for_model("what_if", functions, host_bytes=0)
        unchanged = np.zeros((len(train), info.num_classes), np.float32)
        examples = on_device(train.images, train.labels, metagradient.training.mesh, unchanged)
        influence = None
        trainings = what_if.TRAININGS + 2 * train_config.members
        with progress_bar("what_if", trainings * metagradient.training.num_steps, unit="steps") as bar:
            training = train_config, metagradient, examples
            smoothness = what_if.measure_smoothness(*training, train, margins, bar.advance)
            if smoothness >= SMOOTH:
                derivative = what_if.mean_derivative(*training, bar.advance)
                influence = what_if.influence_table(train, networks.train, list(outputs["output"]), derivative)
        print(f"what_if: {what_if.describe(smoothness)}", file=sys.stderr)

        with stage.writing_outs() as new:
            folder = new / "results" / "what_if"
            folder.mkdir(parents=True)
            outputs.to_csv(folder / "outputs.csv", index=False, float_format="%.9g")
            if influence is not None:
                influence.to_parquet(folder / "influence.parquet", index=False)
            stage.write_metrics(new, info.as_metrics() | {"metasmoothness": smoothness, "outputs": len(outputs)})
            stage.write_costs(new, static_costs(functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "what_if", shows=("metasmoothness", "outputs"))
