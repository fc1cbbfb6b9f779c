"""Split the data set, with label noise and corrections if asked for: `data/raw` → `data/processed`, figures."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from pathlib import Path

from gradtrail.core.data import PreprocessConfig, prepare
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.preprocess import corrections, figures
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(PreprocessConfig)
    info = data_files.read_info(Path("data/raw"))
    raw = data_files.read_raw(Path("data/raw"))
    sizes = {"train": len(raw[1]), "test": len(raw[3])}

    with tracked(stage) as run:
        splits = prepare(*raw, config, num_classes=info.num_classes)
        if config.corrections:
            splits = corrections.apply_corrections(splits, config.corrections, sizes, info.num_classes)
        splits = data_files.with_files(splits, Path("data/raw"))
        train = splits["train"]
        figures.report_classes(train.labels, info.classes)

        with stage.writing_outs() as new:
            info = data_files.write_processed(new / "data/processed", splits, info)
            metrics = data_files.measure_splits(splits)
            figures.draw_samples(
                new / "results/preprocess/samples.png", train, info.label, info.num_classes, info.class_names
            )
            stage.write_metrics(new, {**info.as_metrics(), **metrics})

        run.outs()


if __name__ == "__main__":
    run_stage(main, "preprocess", shows=("train_examples", "validation_examples", "test_examples", "noisy_labels"))
