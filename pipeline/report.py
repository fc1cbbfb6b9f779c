"""Show the results of all stages on one page: metrics, tables, figures and params → `results/report.html`."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from pathlib import Path

from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.report.gallery import make_gallery
from gradtrail.stages.report.numbers import read_sources
from gradtrail.stages.report.page import ReportConfig, render
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(ReportConfig)
    sources = read_sources(Path())

    with tracked(stage) as run:
        gallery = make_gallery(sources)
        page = render(config, sources, gallery)

        with stage.writing_outs() as new:
            (new / "results" / "report.html").write_text(page, encoding="utf-8")
            stage.write_metrics(new, sources.info.as_metrics())

        run.outs()


if __name__ == "__main__":
    run_stage(main, "report", shows=("accuracy", "balanced_accuracy"), of="evaluate")
