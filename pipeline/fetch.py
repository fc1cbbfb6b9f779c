"""Fetch the data set: a mirror, a folder or scikit-learn → `data/raw`."""

import os
from pathlib import Path

from gradtrail.io import datasets, raw_data
from gradtrail.io.data_sources import FetchConfig, acquire
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked
from gradtrail.io.workspace import private_folder


def main(stage: Stage) -> None:
    config, runtime = stage.params(FetchConfig), stage.runtime
    mnist_dir = os.environ.get("MNIST_DIR")

    with tracked(stage) as row:
        with stage.writing_outs() as new:
            raw = new / "data" / "raw"
            raw.mkdir()
            folder = Path(mnist_dir) if mnist_dir else None
            acquire(config, raw, folder=folder, parts=private_folder() / "downloads", runtime=runtime)
            info = raw_data.describe_raw(raw, config.dataset)
            datasets.write_info(raw, info)
            stage.write_metrics(new, {**info.as_metrics(), **raw_data.measure_raw(raw, info)})
        row.outs()


if __name__ == "__main__":
    run_stage(main, "fetch")
