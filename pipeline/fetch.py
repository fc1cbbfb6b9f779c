"""Fetch the data set: a mirror, a folder or scikit-learn → `data/raw`."""

import os
from pathlib import Path

from gradtrail.stages.artifacts import idx
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.fetch.sources import FetchConfig, acquire
from gradtrail.support.paths import private_folder
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config, runtime = stage.params(FetchConfig), stage.runtime
    mnist_dir = os.environ.get("MNIST_DIR")

    with tracked(stage) as run:
        with stage.writing_outs() as new:
            raw = new / "data" / "raw"
            raw.mkdir()
            folder = Path(mnist_dir) if mnist_dir else None
            acquire(config, raw, folder=folder, parts=private_folder() / "downloads", runtime=runtime)
            info = idx.describe_raw(raw, config.dataset)
            dataset.write_info(raw, info)
            stage.write_metrics(new, {**info.as_metrics(), **idx.measure_raw(raw, info)})
        run.outs()


if __name__ == "__main__":
    run_stage(main, "fetch")
