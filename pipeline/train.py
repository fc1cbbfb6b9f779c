"""Train a model: `data/processed` → `models`, history, pictures."""

import time
from pathlib import Path

import jax

from gradtrail.core import prediction, training
from gradtrail.core.compilation import cost_metrics, time_metrics
from gradtrail.core.history import History, on_host
from gradtrail.core.models import Model
from gradtrail.core.train_config import TrainConfig
from gradtrail.io import datasets, histories
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.figures import train as figures
from gradtrail.io.progress import progress_bar
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config = stage.params(TrainConfig)
    info = datasets.read_info(Path("data/processed"))
    train = datasets.read_split(Path("data/processed/train.npz"), info)
    validation = datasets.read_split(Path("data/processed/validation.npz"), info)

    set_up_jax(stage.runtime)

    with tracked(stage) as row:
        model = Model(config.model_config(info.image_shape, info.num_classes), remat=config.remat)
        program = training.make_program(config, model, len(train))
        engine = training.compile_engine(program, clock=time.perf_counter)
        predict = prediction.compile_predict(model, prediction.VALIDATION_BATCH_SIZE, clock=time.perf_counter)
        functions = [*engine.functions, predict]
        row.metrics(time_metrics(functions))

        examples = training.on_device(train.images, train.labels)
        state = engine.init(jax.random.key(config.seed))
        history = History(config.keep_epochs, on_host(state.params))
        started = time.perf_counter()
        with progress_bar("train", engine.num_steps, unit="steps") as bar:
            for chunk in training.train(engine, state, examples, steps_per_call=stage.runtime.steps_per_call):
                state = chunk.state
                if chunk.ends_epoch:
                    params = on_host(engine.evaluation_params(state))
                    history.add(
                        chunk, params, prediction.validate(predict, params, validation.images, validation.labels)
                    )
                    row.curves(histories.live_curves(history, engine.num_steps))
                bar.update(chunk.step, message=history.describe())
                if chunk.ends_epoch and history.has_stalled(config.patience):
                    break
        row.metrics(histories.measure_time(history, time.perf_counter() - started))

        with stage.writing_outs() as new:
            histories.write_all_weights(new / "models", history, model.config, config.label_smoothing, info)
            histories.write_tables(new / "results" / "train", history, train.example_id)
            figures.draw(new / "results" / "train", history, f"{model.config.name} on {info.label}", config.clip_norm)
            measured = histories.measure(history, engine.num_steps)
            num_parts = config.accumulation_steps * program.mesh.size
            measured |= histories.measure_noise_scale(history, config.batch_size, num_parts)
            stage.write_metrics(new, {**info.as_metrics(), **measured, **cost_metrics(functions)})

        row.outs()
        row.checkpoint(state)


if __name__ == "__main__":
    run_stage(main, "train")
