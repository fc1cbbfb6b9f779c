"""Split the data set, with label noise and corrections if asked for: `data/raw` → `data/processed`, figures."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

from pathlib import Path

from gradtrail.core.data import PreprocessConfig, prepare
from gradtrail.stages.artifacts import idx
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.preprocess import corrections, figures, small_classes, writing
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(PreprocessConfig)
    if config.deformations > 1:
        stage.set_up_jax()
    info = dataset.read_info(Path("data/raw"))
    raw = idx.read_raw(Path("data/raw"), info)

    with tracked(stage) as run:
        splits = prepare(raw.images, raw.labels, raw.test_images, raw.test_labels, config, num_classes=info.num_classes)
        if config.corrections:
            sizes = {"train": len(raw.labels), "test": len(raw.test_labels)}
            rows = corrections.read_applied(corrections.PATH, config.corrections)
            splits = corrections.apply_corrections(splits, rows, sizes, info.num_classes, corrections.PATH)

        small_classes.warn(splits["train"].labels, info.num_classes, versions=config.deformations)
        total = config.deformations * len(splits["train"])
        with stage.writing_outs() as new, progress_bar("preprocess", total, unit="steps") as bar:
            processed = new / "data" / "processed"
            metrics = writing.write(processed, splits, info, config, num_ids=len(raw.labels), advance=bar.advance)
            figures.draw(new / "results" / "preprocess", splits, info.label, info.num_classes)
            stage.write_metrics(new, {**info.as_metrics(), **metrics})

        run.outs()


if __name__ == "__main__":
    run_stage(main, "preprocess", shows=("train_examples", "validation_examples", "test_examples", "noisy_labels"))
