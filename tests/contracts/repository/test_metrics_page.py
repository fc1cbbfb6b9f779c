"""The page of metrics has every metric that a run of the pipeline writes or logs, and none that no code writes."""

import re

import pytest
from projects import ROOT, STAGES, finished_project

from gradtrail.stages.common.files import read_json
from gradtrail.tracking.names import METRICS, metric_name

PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAMES = {name for cells in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cells)}
COMPILE = "compile_"  # begins the metrics that each compiling stage has; the page has those of `profile`


# Metrics of optional pipelines, prices, members, unequal or many classes, noisy labels, examples that are not analyzed,
# changed, private and interrupted trainings
CONDITIONAL = re.compile(
    r"(privacy_)?audit/|what_if/|eval/(ensemble_|balanced_|top_5_|accuracy_corrected_labels)"
    r"|gradients/(every_example/|sampled_)|profile/bfloat16_|train/(cost|delta|epsilon|noise_|removed_|relabeled_|seconds_)"
)


def missing(names: set[str]) -> set[str]:
    """Return the names that are not on the page, neither by themselves nor as the end of an interval."""
    base = {re.sub(r"_(low|high|sd)$", "", name) for name in names}
    return {name for name in base if name.replace(name.partition(f"/{COMPILE}")[0], "profile", 1) not in NAMES} - NAMES


@pytest.mark.slow
def test_page_has_the_metrics_of_a_run_and_no_others() -> None:
    project = finished_project()
    logged = {name for run in project.runs() for name in run["metrics"] if not name.startswith("system/")}
    assert {"eval/error_percent", "steps/loss", "train/elapsed_seconds", "profile/compile_total_seconds"} <= logged
    assert not missing(logged)

    files = [project.folder / f"results/metrics/{stage}.json" for stage in STAGES]
    files += sorted(project.folder.glob("results/*/other_metrics.json"))
    for file in files:
        stage = file.stem if file.parent.name == "metrics" else file.parent.name
        keys = {metric_name(stage, key) for key, value in read_json(file).items() if not isinstance(value, str)}
        assert not missing(keys), file
        logged |= keys
    assert {name for name in NAMES - logged if not CONDITIONAL.match(name)} == set()


def test_every_row_of_the_table_is_about_a_metric_of_the_page() -> None:
    known = {*NAMES, f"train/{COMPILE}total_seconds", "train/members"}
    assert [row for row in METRICS if not any(re.fullmatch(row, name) for name in known)] == []
