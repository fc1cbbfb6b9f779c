"""Train a model: `data/processed` → `models`, history, figures. A stopped one resumes from its last checkpoint."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

import functools
import time
from pathlib import Path

import jax

from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common import dataset
from gradtrail.stages.common.environment import set_cpu_devices
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.train import figures, tables
from gradtrail.stages.train import loop as training_runs
from gradtrail.stages.train.checkpointing import resume_folder
from gradtrail.support.memory import require_memory
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked
from gradtrail.tracking.mlflow.training_log import TrainingLog


def main(stage: Stage) -> None:
    config = stage.params(TrainConfig)
    info = dataset.read_info(Path("data/processed"))
    train = dataset.read_split(Path("data/processed/train.npz"), info)
    validation = dataset.read_split(Path("data/processed/validation.npz"), info)

    set_cpu_devices(config.shards)

    with tracked(stage) as run, compiling(run) as compiler:
        checkpoints = resume_folder(run.stage.state, stage.runtime, clock=time.monotonic)
        model = Model(config.model_config(info.image_shape, info.num_classes), remat=config.remat)
        program = loop.make_program(config, model, len(train), jax.local_devices())
        engine = loop.compile_engine(program, compiler=compiler)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        functions = [*engine.functions, predict]
        fixed = engine.run_steps.cost.argument_bytes
        require_memory("train.batch_size", config.batch_size, functions, fixed_bytes=fixed)
        with TrainingLog(run, engine, stage.runtime) as listener:
            done = training_runs.run(
                engine,
                functools.partial(inference.validate, predict, images=validation.images, labels=validation.labels),
                train,
                config,
                listener=listener,
                checkpoints=checkpoints,
                steps_per_call=stage.runtime.steps_per_call,
            )
        history = done.history
        run.metrics(tables.measure_time(history, done.seconds))

        with stage.writing_outs() as new:
            tables.write_all_weights(new / "models", history, model.config, config.label_smoothing, info)
            tables.write_tables(new / "results" / "train", history, train.example_id)
            figures.draw(new / "results" / "train", history, f"{model.config.name} on {info.label}", config.clip_norm)
            measured = tables.measure(history, engine.num_steps)
            num_parts = config.accumulation_steps * config.shards
            measured |= tables.measure_noise_scale(history, config.batch_size, num_parts)
            stage.write_metrics(new, {**info.as_metrics(), **measured})
            stage.write_costs(new, static_costs(functions))

        run.outs()
        run.checkpoint(done.state, history.final.params)
        run.at_end(checkpoints.remove)


if __name__ == "__main__":
    run_stage(main, "train", shows=("epochs", "cross_entropy", "validation_loss", "validation_accuracy"))
