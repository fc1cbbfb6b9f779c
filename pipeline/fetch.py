"""Fetch the data set: a mirror, a folder or scikit-learn → `data/raw`."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.fetch import FetchConfig, acquire
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config, runtime = stage.params(FetchConfig), stage.runtime

    with tracked(stage) as run:
        with stage.writing_outs() as new:
            raw = new / "data" / "raw"
            raw.mkdir()
            info = acquire(config, raw, runtime)
            data_files.write_info(raw, info)
            stage.write_metrics(new, {**info.as_metrics(), **data_files.measure_raw(raw, info)})
        run.outs()


if __name__ == "__main__":
    run_stage(main, "fetch", shows=("train_examples", "test_examples"))
