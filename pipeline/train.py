"""Train a model: `data/processed` → `models`, history, figures. A stopped one resumes from its last checkpoint."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from gradtrail.core.common.split import Split
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model, num_parameters
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.artifacts import accounting, splits
from gradtrail.stages.artifacts.members import over_members
from gradtrail.stages.artifacts.privacy import write_promise
from gradtrail.stages.common import dataset
from gradtrail.stages.common.environment import set_cpu_devices
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.train import figures, members, tables
from gradtrail.stages.train import loop as training_runs
from gradtrail.stages.train.checkpointing import ResumeFolder, resume_folder
from gradtrail.stages.train.release import promise_of
from gradtrail.stages.train.secret import of_training, read_secret
from gradtrail.support.memory import require_memory
from gradtrail.tracking.gc.files import forget_old_members
from gradtrail.tracking.lineage.state import lock_of
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import TrackedRun, tracked
from gradtrail.tracking.mlflow.training_log import TrainingLog


@contextlib.contextmanager
def member_checkpoints(run: TrackedRun, seeds: MemberSeeds, *, several: bool) -> Iterator[ResumeFolder]:
    """Yield the checkpoints of a member; of one of several they stay, for trainings with other members."""
    stage, state = run.stage, run.stage.member_state(dataclasses.asdict(seeds))
    with lock_of(stage.name, state) if state != stage.state else contextlib.nullcontext():  # which is locked already
        checkpoints = resume_folder(state, stage.runtime, clock=time.monotonic, user=stage.state)
        is_kept = several or checkpoints.is_complete
        if checkpoints.is_begun:
            run.timings(resumed=True)
        yield checkpoints
        if not is_kept:
            run.at_end(checkpoints.remove)


def main(stage: Stage) -> None:
    config = stage.params(TrainConfig)
    info = dataset.read_info(Path("data/processed"))
    train = splits.open_train(
        Path("data/processed/train.npz"),
        info,
        stream_above_mib=stage.runtime.stream_above_mib,
        private=config.privacy.enabled,
    )
    validation = dataset.read_split(Path("data/processed/validation.npz"), info)

    secret = read_secret(config.privacy)
    spending = accounting.account(config, len(train)) if config.privacy.enabled else None
    epsilons = spending.epsilons if spending else ()
    set_cpu_devices(config.shards)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        model = Model(config.model_config(info.image_shape, info.num_classes), remat=config.remat)
        noise = spending.noise_multiplier if spending else None
        streamed = not isinstance(train, Split)
        program = loop.make_program(
            config, model, len(train), jax.local_devices(), noise_multiplier=noise, streamed=streamed
        )
        engine = loop.compile_engine(program, compiler=compiler)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        functions = [*engine.functions, predict]
        fixed = engine.run_steps.cost.argument_bytes
        require_memory("train.batch_size", config.batch_size, functions, fixed_bytes=fixed)
        members.require_space(scratch, config, num_parameters(model.abstract_params()), len(train))
        results = training_runs.train_members(
            engine,
            functools.partial(inference.validate, predict, images=validation.images, labels=validation.labels),
            train,
            config,
            members=training_runs.Members(
                checkpoints=functools.partial(member_checkpoints, run, several=config.members > 1),
                secret=of_training(secret, config, train) if isinstance(train, Split) else None,
                epsilons=epsilons,
            ),
            listener=TrainingLog(run, engine, is_live=config.members == 1, epsilons=epsilons, privacy=config.privacy),
            steps_per_call=stage.runtime.steps_per_call,
        )
        first, written = members.write_each(scratch, results, model.config, config, info, train.example_id)
        epochs = members.mean_epochs(written)
        run.metrics(members.measure_time(written))
        run.timings(classes=info.num_classes)

        with stage.writing_outs() as new:
            members.write_members(new, written)
            title = f"{model.config.name} on {info.label}"
            figures.draw(
                new / "results" / "train", epochs, tables.step_table(first.history.steps), title, config.clip_norm
            )
            measured = over_members([member.metrics for member in written.values()])
            spent: dict[str, float] = {}
            if spending:
                lengths = [len(member.epochs) for member in written.values()]
                spent, steps = spending.measure(lengths), sum(lengths) * spending.steps_per_epoch
                promise = promise_of(config, spent, num_examples=len(train), steps=steps)
                write_promise(new / "results" / "train", promise)
            stage.write_metrics(new, {**info.as_metrics(), **measured, **spent})
            stage.write_costs(new, static_costs(functions))

        run.outs()
        run.checkpoint(first.state, first.history.final.params)
        run.at_end(forget_old_members)


if __name__ == "__main__":
    run_stage(main, "train", shows=("epochs", "cross_entropy", "validation_loss", "validation_accuracy"))
