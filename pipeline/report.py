"""Tell what came of a run on one page: metrics, tables, pictures and params of all stages → `reports/report.html`."""

from pathlib import Path

from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.report import inputs
from gradtrail.stages.report import page as report
from gradtrail.stages.report.page import ReportConfig
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(ReportConfig)
    sources = inputs.read_sources(Path())

    with tracked(stage) as run:
        sections = report.sections_of(sources)
        page = report.render(config, sources, sections)

        with stage.writing_outs() as new:
            (new / "reports" / "report.html").write_text(page, encoding="utf-8")
            stage.write_metrics(new, report.measure(sources, sections, page))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "report")
