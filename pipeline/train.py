"""Train a model: `data/processed` → `models`, history, figures. A stopped one resumes from its last checkpoint."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from gradtrail.core.nn import inference
from gradtrail.core.nn.models import num_parameters
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.artifacts.members import over_members
from gradtrail.stages.artifacts.privacy import write_guarantee
from gradtrail.stages.common import dataset, processes
from gradtrail.stages.common.setup import cached_compiler
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.train import figures, members, tables
from gradtrail.stages.train import loop as training_runs
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.release import guarantee_of
from gradtrail.stages.train.training import Training, in_first_process, load_training
from gradtrail.tracking.gc.files import forget_old_members
from gradtrail.tracking.lineage.state import lock_of
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import TrackedRun, tracked
from gradtrail.tracking.mlflow.training_log import TrainingLog


@contextlib.contextmanager
def member_checkpoints(run: TrackedRun, training: Training, seeds: MemberSeeds) -> Iterator[Checkpoints]:
    """Yield the checkpoints of a member; those of one of several stay, for trainings with other members."""
    stage, state = run.stage, run.stage.member_state(dataclasses.asdict(seeds))
    with lock_of(stage.name, state) if state != stage.state else contextlib.nullcontext():  # its lock is held already
        checkpoints = training.checkpoints(state, user=stage.state)
        is_kept = training.config.members > 1 or checkpoints.is_complete
        if checkpoints.has_checkpoints:
            run.timings(resumed=True)
        yield checkpoints
        if not is_kept:
            run.at_end(checkpoints.remove)


def main(stage: Stage) -> None:
    config = stage.params(TrainConfig)
    training = load_training(Path("data/processed"), config, stage.runtime)
    info, train, spending = training.info, training.train, training.spending
    validation = dataset.read_split(Path("data/processed/validation.npz"), info)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        model, engine = training.model, training.compile(compiler)
        processes.agreed(lambda: None)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        functions = [*engine.functions, predict]
        training.require_memory(engine, functions)
        members.require_space(scratch, config, num_parameters(model.abstract_params()), engine.num_sampled)
        validate = functools.partial(inference.validate, predict, images=validation.images, labels=validation.labels)
        results = training_runs.train_members(
            engine,
            in_first_process(validate),
            train,
            config,
            members=training.members(functools.partial(member_checkpoints, run, training), stage.inputs.have_changed),
            listener=TrainingLog(
                run, engine, is_live=config.members == 1, epsilons=training.epsilons, privacy=config.privacy
            ),
            steps_per_call=training.steps_per_call,
        )
        first, written = members.write_each(scratch, results, model.config, config, info, training.sampled_id)
        processes.leave()
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
                lengths = spending.counted([len(member.epochs) for member in written.values()])
                spent, steps = spending.measure(lengths), sum(lengths) * spending.steps_per_epoch
                guarantee = guarantee_of(config, spent, num_examples=len(train), steps=steps)
                write_guarantee(new / "results" / "train", guarantee)
            stage.write_metrics(new, {**info.as_metrics(), **measured, **spent})
            stage.write_costs(new, static_costs(functions))

        run.outs()
        run.checkpoint(first.state, first.history.final.params)
        run.at_end(forget_old_members)


def follow(stage: Stage) -> None:
    """Train with process 0, which writes and logs."""
    config = stage.params(TrainConfig)
    training = load_training(Path("data/processed"), config, stage.runtime)

    training.follow(cached_compiler(stage.runtime))
    processes.leave()


if __name__ == "__main__":
    run_stage(
        main,
        "train",
        shows=("epochs", "cross_entropy", "validation_loss", "validation_accuracy"),
        follow=follow,
    )
