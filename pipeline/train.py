"""Train a model: `data/processed` → `models`, history, pictures. A training that was stopped goes on where it stood."""

import time
from pathlib import Path

from gradtrail.core import prediction, training
from gradtrail.core.compilation import cost_metrics
from gradtrail.core.models import Model
from gradtrail.core.train_config import TrainConfig
from gradtrail.io import datasets, histories, training_runs
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.compile_profiles import compiling
from gradtrail.io.figures import train as figures
from gradtrail.io.memory import require_memory
from gradtrail.io.resume import resume_folder
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config = stage.params(TrainConfig)
    info = datasets.read_info(Path("data/processed"))
    train = datasets.read_split(Path("data/processed/train.npz"), info)
    validation = datasets.read_split(Path("data/processed/validation.npz"), info)

    set_up_jax(stage.runtime)

    with tracked(stage) as row, compiling(row) as compiler:
        checkpoints = resume_folder(row.stage, clock=time.monotonic)
        model = Model(config.model_config(info.image_shape, info.num_classes), remat=config.remat)
        program = training.make_program(config, model, len(train))
        engine = training.compile_engine(program, compiler=compiler)
        predict = prediction.compile_predict(model, prediction.VALIDATION_BATCH_SIZE, compiler=compiler)
        functions = [*engine.functions, predict]
        fixed = engine.run_steps.cost.argument_bytes
        require_memory("train.batch_size", config.batch_size, functions, fixed_bytes=fixed)
        done = training_runs.run(
            engine, predict, train, validation, config, row=row, checkpoints=checkpoints, runtime=stage.runtime
        )
        history = done.history
        row.metrics(histories.measure_time(history, done.seconds))

        with stage.writing_outs() as new:
            histories.write_all_weights(new / "models", history, model.config, config.label_smoothing, info)
            histories.write_tables(new / "results" / "train", history, train.example_id)
            figures.draw(new / "results" / "train", history, f"{model.config.name} on {info.label}", config.clip_norm)
            measured = histories.measure(history, engine.num_steps)
            num_parts = config.accumulation_steps * program.mesh.size
            measured |= histories.measure_noise_scale(history, config.batch_size, num_parts)
            stage.write_metrics(new, {**info.as_metrics(), **measured, **cost_metrics(functions)})

        row.outs()
        row.checkpoint(done.state)
        checkpoints.remove()


if __name__ == "__main__":
    run_stage(main, "train")
