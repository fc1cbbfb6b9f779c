"""Train a model: `data/processed` → `models`, history, figures. A stopped one resumes from its last checkpoint."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import sys

from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common.setup import cached_compiler
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.train.advice import sensible_start
from gradtrail.stages.train.outputs import Outputs
from gradtrail.stages.train.tables import COMPARED
from gradtrail.stages.train.training import NullListener, Training
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.leftovers import forget_old_members
from gradtrail.tracking.live import tracked
from gradtrail.tracking.stale_outs import warn_of_other_files
from gradtrail.tracking.training_log import TrainingLog


def main(stage: Stage) -> None:
    training = Training.load(stage)
    if advice := sensible_start(training.config, training.info):
        print(advice, file=sys.stderr)
    if (size := training.config.batch_size) > (count := len(training.train)):
        print(f"train: each step has all {count:,} training examples, as train.batch_size is {size:,}", file=sys.stderr)
    warn_of_other_files(stage.folder)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        if training.start:
            print(f"train: starts from {training.start.describe()}", file=sys.stderr)
        training.stopwatch = run.stopwatch
        training.compile(compiler)
        outputs = Outputs(training, scratch)
        training.run(TrainingLog(run, training), outputs.add)

        with stage.writing_outs() as new:
            outputs.write(new)
            stage.write_metrics(new, outputs.metrics, COMPARED)
            stage.write_costs(new, static_costs(training.functions))

        run.metrics({"seconds": outputs.seconds})
        run.timings(classes=training.info.num_classes)
        run.outs()
        run.checkpoint(outputs.first.state)
        run.at_end(forget_old_members)


def follow(stage: Stage) -> None:
    """Train with process 0, which writes and logs."""
    training = Training.load(stage)
    training.compile(cached_compiler(stage.runtime))
    training.run(NullListener(), lambda *_: None)


if __name__ == "__main__":
    run_stage(main, "train", shows=("epochs", "cross_entropy", "validation_loss", "validation_accuracy"), follow=follow)
