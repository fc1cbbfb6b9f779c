"""Split the data set, inject label noise if asked: `data/raw` → `data/processed`, pictures."""

from pathlib import Path

from gradtrail.core.preprocessing import PreprocessConfig, prepare
from gradtrail.io import datasets, raw_data
from gradtrail.io.figures import preprocess as figures
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config = stage.params(PreprocessConfig)
    info = datasets.read_info(Path("data/raw"))
    raw = raw_data.read_raw(Path("data/raw"), info)

    with tracked(stage) as row:
        splits = prepare(raw.images, raw.labels, raw.test_images, raw.test_labels, config, num_classes=info.num_classes)

        with stage.writing_outs() as new:
            datasets.write_processed(new / "data" / "processed", splits, info)
            figures.draw(new / "results" / "preprocess", splits, info.label, info.num_classes)
            stage.write_metrics(new, {**info.as_metrics(), **datasets.measure_splits(splits)})

        row.outs()


if __name__ == "__main__":
    run_stage(main, "preprocess")
