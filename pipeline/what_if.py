"""Ask what if a training example had not been there: `data/processed`, `models` → predicted changes, a figure, a summary."""

from gradtrail.tracking.journal import start_logger

start_logger(__name__)

import sys
from pathlib import Path

import numpy as np

from gradtrail.core.gradients.metagradient import compile_metagradient, require_differentiable
from gradtrail.core.gradients.what_if import (
    SMOOTH,
    WhatIfConfig,
    choose_test_examples,
    compile_predict,
    make_outputs,
)
from gradtrail.core.nn.models import Model
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import on_device
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import what_if
from gradtrail.stages.artifacts import data_files
from gradtrail.stages.artifacts.data_files import require_undeformed
from gradtrail.stages.artifacts.members import weights_paths
from gradtrail.stages.artifacts.weights import read_members
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.support.memory import require_memory_for_model
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.journal import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(WhatIfConfig), stage.params(TrainConfig, "train")
    require_differentiable(train_config)
    what_if.require_unchanged(train_config)
    info = data_files.read_info(Path("data/processed"))
    require_undeformed(info, "what_if")
    splits = data_files.read_splits(Path("data/processed"))
    train, num_classes = splits["train"], info.num_classes
    model = Model(train_config.model_config(info.image_shape, num_classes), remat=train_config.remat)

    with tracked(stage) as run, compiling(run) as compiler:
        # The outputs of the trained networks
        predict = compile_predict(model, compiler=compiler)
        networks = (params for _, _, params, _ in read_members(weights_paths(Path("models"), "final"), info))
        predictions = what_if.mean_predictions(predict, networks, splits)
        rows = choose_test_examples(config, splits["test"], predictions["test"]["margin"])
        outputs = what_if.outputs_of(splits, predictions, rows)

        # Their derivatives by the weights of the training examples, if these predict anything
        metagradient = compile_metagradient(
            train_config,
            model,
            len(train),
            make_outputs(model, outputs.test, splits["validation"], train_config.batch_size),
            memory_bytes=config.memory_mib * 2**20,
            compiler=compiler,
        )
        functions = [predict, *metagradient.functions]
        require_memory_for_model("what_if", functions, host_bytes=0)
        unchanged = np.zeros((len(train), num_classes), np.float32)
        examples = on_device(train.images, train.labels, metagradient.program.mesh, unchanged)
        trainings, influence = what_if.TRAININGS + 2 * train_config.members, None
        with progress_bar("what_if", trainings * metagradient.program.num_steps, unit="steps") as bar:
            smoothness = what_if.measure_smoothness(
                train_config, metagradient, examples, splits, predict, advance=bar.advance
            )
            if smoothness >= SMOOTH:
                derivative = what_if.mean_derivative(train_config, metagradient, examples, advance=bar.advance)
                proposed = what_if.proposed_labels(train, predictions["train"])
                influence = what_if.influence_table(train, proposed, outputs.names, derivative)
        if influence is None:
            print(f"what_if: {what_if.describe_smoothness(smoothness)}", file=sys.stderr)

        with stage.writing_outs() as new:
            title = f"{model.config.name} on {info.label}"
            what_if.write(new / "results" / "what_if", smoothness, outputs, influence, train, info.classes, title)
            measured = what_if.what_if_metrics(smoothness, outputs, influence)
            stage.write_metrics(new, {**info.as_metrics(), **measured})
            stage.write_costs(new, static_costs(functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "what_if", shows=("metasmoothness", "outputs", "influence_held_by_largest"))
