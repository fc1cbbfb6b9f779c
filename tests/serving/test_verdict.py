"""`deploy/slo.yaml` and `gradtrail verdict`: planted faults fail exactly their limits; measuring in fresh processes."""

import dataclasses
import json
import math
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from exports import write_wrong_export
from factories import ROOT
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from model_store import enter_store, evaluation, training
from projects import empty_store

from gradtrail.core.intervals import Interval, share_interval
from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.probe import COLD, WARM, measure
from gradtrail.serving.release import promote
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict import AT_LEAST, Measured, as_texts, judge, verdict, verdict_tag
from gradtrail.support.errors import UserError

SLO = Path("deploy/slo.yaml")
LIMITS = read_slo(ROOT / SLO).limits
LABELS = np.arange(2000) % 10
FAST = {
    "memory_mib": 300.0,
    COLD: 2.0,
    WARM: 1.5,
    "first_answer_ms": 1.0,
    "p50_ms_1": 0.2,
    "p99_ms_1": 0.5,
    "p50_ms_32": 0.4,
    "p99_ms_32": 1.0,
    "images_per_second": 200_000.0,
}


def number(value: float, low: float | None = None, high: float | None = None) -> Measured:
    return Measured(value=value, low=value if low is None else low, high=value if high is None else high, how="")


def good() -> dict[str, Measured]:
    """Numbers that pass every limit."""
    return {name: number((1.02 if name in AT_LEAST else 0.8) * limit) for name, limit in vars(LIMITS).items()}


def failed(rows: Mapping[str, Mapping]) -> set[str]:
    return {name for name, row in rows.items() if row["pass"] is False}


def test_number_past_its_limit_fails_only_that_limit():
    assert vars(LIMITS).keys() >= AT_LEAST
    assert failed(judge(LIMITS, good())) == set()
    for name, limit in vars(LIMITS).items():
        rows = judge(LIMITS, good() | {name: number((0.9 if name in AT_LEAST else 1.1) * limit)})
        assert failed(rows) == {name}
        assert rows[name]["verdict"] == "fail"


@given(
    value=st.floats(0.1, 10),
    below=st.floats(0, 5),
    above=st.floats(0, 5),
    name=st.sampled_from(["p50_ms_1", "agreement"]),
)
def test_worse_end_decides_and_interval_across_the_limit_is_inconclusive(
    value: float, below: float, above: float, name: str
):
    limits = dataclasses.replace(LIMITS, p50_ms_1=2.0, agreement=0.96)
    limit, measured = getattr(limits, name), number(value, value - below, value + above)
    row = judge(limits, {name: measured})[name]
    ends = [end >= limit if name == "agreement" else end <= limit for end in (measured.low, measured.high)]
    assert row["pass"] == all(ends) == (row["margin"] >= 0)
    assert ("inconclusive" in row["verdict"]) == (ends.count(True) == 1)


def test_infinite_end_and_nan_fail():
    row = judge(LIMITS, {"p99_ms_1": number(1.0, -math.inf, math.inf)})["p99_ms_1"]
    assert (row["low"], row["high"], row["margin"], row["pass"]) == (None, None, None, False)
    assert [*as_texts("p99_ms_1", row).values()][2:] == ["−∞ to ∞", "at most 10", "–", "fail: inconclusive"]
    assert "p99_ms_1" in failed(judge(LIMITS, good() | {"p99_ms_1": number(math.nan)}))


def test_missing_number_fails_unless_it_is_excused_or_its_limit_is_null():
    numbers = good() | {"agreement": "not judged: there is no champion", "memory_mib": "no idea"}
    rows = judge(dataclasses.replace(LIMITS, p99_ms_1=None), numbers)
    assert failed(rows) == {"memory_mib"}
    assert rows["agreement"]["verdict"] == "not judged: there is no champion"
    cells = ["memory_mib", "–", "–", "at most 768", "–", "fail: not known, no idea"]
    assert [*as_texts("memory_mib", rows["memory_mib"]).values()] == cells
    assert as_texts("p99_ms_1", rows["p99_ms_1"])["must be"] == "–"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("agreement: 0.96", "agreement: 1.5", "limits.agreement must be at least 0 and at most 1, got 1.5"),
        ("  agreement: 0.96\n", "", "limits.agreement is missing"),
        ("p99_ms_1: 10.0", "p98_ms_1: 10.0", "limits.p98_ms_1 is not a known key; did you mean 'p99_ms_1'?"),
        ("p99_ms_1: 10.0", "p99_ms_1: fast", "limits.p99_ms_1: Input should be a valid number, got 'fast'"),
        ("significance: 0.01", "significance: 0", "canary.significance must be above 0"),
        ("canary:", "canaries:", "section 'canary' is missing"),
    ],
)
def test_mistake_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, message: str):
    text, path = (ROOT / SLO).read_text(), tmp_path / "slo.yaml"
    assert old in text
    path.write_text(text.replace("  p50_ms_1: 2.0", "  p50_ms_1: null"))
    assert read_slo(path).limits == dataclasses.replace(LIMITS, p50_ms_1=None)
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError) as error:
        read_slo(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def fast(folder: Path, **slower: float) -> dict[str, list[float]]:
    """Return what the processes of a fast model measure."""
    assert (folder / "manifest.json").is_file()
    return {name: [*(value * np.linspace(0.9, 1.1, 6))] for name, value in (FAST | slower).items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    """The client of one store for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        yield enter_store(empty_store(), tmp_path_factory.mktemp("store"), patch)


@pytest.fixture(scope="module")
def run(client: MlflowClient, exported: Callable[[int], Path]) -> Run:
    """An evaluated training, right about 1,980 of 2,000 examples."""
    SLO.parent.mkdir()
    shutil.copy(ROOT / SLO, SLO)
    made = training(client, seed=1, export=exported(1))
    evaluate(client, made, predictions(20))
    return made


def evaluate(client: MlflowClient, run: Run, predicted: np.ndarray) -> None:
    """Log an evaluation with a confidence of 0.99, and an export with its metrics."""
    evaluation(client, run, predicted, labels=LABELS)
    hits = predicted == LABELS
    error = abs(0.99 - hits.mean())
    recalls = [share_interval(int(hits[k == LABELS].sum()), 200) for k in range(10)]
    measured = {
        "accuracy": share_interval(int(hits.sum()), len(hits)),
        "worst_class_recall": min(recalls, key=operator.attrgetter("low")),
        "expected_calibration_error": Interval(value=error, low=error, high=error),
    }
    child = find_candidate(run.info.run_id, client).exported
    for name, interval in measured.items():
        for key, value in {"": interval.value, "_low": interval.low, "_high": interval.high}.items():
            client.log_metric(child.info.run_id, f"export/{name}{key}", value)


def predictions(wrong: int) -> np.ndarray:
    """Predictions of which some are wrong, spread over the classes."""
    return np.where(np.arange(2000) < wrong, (LABELS + 1) % 10, LABELS)


@pytest.fixture
def judged(capsys: pytest.CaptureFixture) -> Callable[..., dict]:
    """Judges a run; returns what is printed as JSON."""

    def judged(run: Run, **slower: float) -> dict:
        status = verdict(run.info.run_id, SLO, as_json=True, measured=lambda folder: fast(folder, **slower))
        content = json.loads("{" + capsys.readouterr().out.partition("{")[2])  # without what was printed before
        assert content["verdict"] == ("pass" if status == 0 else "fail")
        return content

    return judged


def test_good_model_passes_and_every_number_has_an_interval(run: Run, judged: Callable[..., dict]):
    rows = judged(run)["limits"]
    assert failed(rows) == set()
    assert rows["agreement"]["verdict"] == "not judged: there is no champion"
    assert rows[WARM]["verdict"] == "not judged"
    for name, row in rows.items():
        if name != "agreement":
            assert row["low"] <= row["value"] <= row["high"], name
            assert row["how"], name
            assert name == WARM or row["margin"] >= 0, name
    expected = share_interval(1980, 2000)
    assert [rows["accuracy_lower_bound"][end] for end in ("low", "high")] == pytest.approx(
        [expected.low, expected.high]
    )
    assert rows["worst_class_recall"]["value"] == pytest.approx(0.99)
    assert rows["calibration_error"]["value"] == pytest.approx(0.0, abs=1e-6)


def test_run_has_json_table_and_tag_but_no_metric(
    client: MlflowClient, run: Run, tmp_path: Path, judged: Callable[..., dict]
):
    content = judged(run)
    stored = client.get_run(run.info.run_id)
    assert stored.data.metrics == {}
    tags = {key: value for key, value in stored.data.tags.items() if "verdict" in key + value}
    assert tags == {  # outcome and limits in one, so that two verdicts cannot mix
        "verdict": verdict_tag("pass", content["export_digest"], LIMITS),
        "mlflow.loggedArtifacts": '[{"path": "tables/verdict.json", "type": "table"}]',
    }
    logged = {name: client.download_artifacts(run.info.run_id, name, str(tmp_path)) for name in ("verdict", "tables")}
    as_json, table = (json.loads(Path(folder, "verdict.json").read_text()) for folder in logged.values())
    assert as_json == content
    assert table["columns"] == ["limit", "value", "95 % interval", "must be", "margin", "verdict"]
    assert table["data"][0][:4] == ["accuracy_lower_bound", "0.99", "0.9846 to 0.9935", "at least 0.975"]
    assert ["memory_mib", "300", "270 to 330", "at most 768", "+438", "pass"] in table["data"]
    assert ["size_mib", "exact"] in [[row[0], row[2]] for row in table["data"]]
    judged(run, p99_ms_1=100.0)
    assert client.get_run(run.info.run_id).data.tags["verdict"].startswith("fail: ")


def test_wrong_model_fails_exactly_its_limits(
    client: MlflowClient, run: Run, exported: Callable[[int], Path], judged: Callable[..., dict]
):
    wrong = training(client, seed=2, export=exported(2))
    evaluate(client, wrong, predictions(1000))
    of_export = {"accuracy_lower_bound", "calibration_error", "worst_class_recall"}
    assert failed(judged(wrong)["limits"]) == of_export
    one_class = training(client, seed=3, export=exported(3))
    evaluate(client, one_class, np.where((LABELS == 7) & (np.arange(2000) < 220), 1, LABELS))  # 22 of the 200 sevens
    rows = judged(one_class)["limits"]
    assert failed(rows) == {"worst_class_recall"}
    assert rows["accuracy_lower_bound"]["value"] == pytest.approx(0.989)
    assert rows["worst_class_recall"]["value"] == pytest.approx(0.89)

    # Without the metrics of an export, its limits fail.
    bare = training(client, seed=2, name="bare", export=exported(2))
    rows = judged(bare)["limits"]
    assert failed(rows) == of_export
    assert "the run of `export` has no such metric" in rows["calibration_error"]["verdict"]


def test_agreement_with_the_champion_is_judged(
    client: MlflowClient, run: Run, exported: Callable[[int], Path], judged: Callable[..., dict]
):
    judged(run)
    assert promote(run.info.run_id, as_champion=True, is_forced=False, reason="") == 0
    assert judged(run)["limits"]["agreement"]["verdict"] == "not judged: this is the champion"
    for seed, differing, passes in ((4, 20, True), (5, 90, False)):
        other = training(client, seed=seed, export=exported(seed - 2))
        predicted = predictions(20)
        predicted[100 : 100 + differing] = (predicted[100 : 100 + differing] + 1) % 10
        evaluate(client, other, predicted)
        row = judged(other)["limits"]["agreement"]
        assert row["pass"] is passes
        expected = share_interval(2000 - differing, 2000)
        assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high))


def test_terminal_shows_every_limit_and_bad_input_is_one_line(run: Run, capsys: pytest.CaptureFixture):
    assert verdict("mlp 1", SLO, as_json=False, measured=lambda folder: fast(folder, p50_ms_1=9.0)) == 1
    output = capsys.readouterr().out
    assert all(name in output for name in [*vars(LIMITS), WARM])
    assert "verdict: fail: p50_ms_1" in output
    with pytest.raises(UserError, match="no run has this name"):
        verdict("nowhere", SLO, as_json=False, measured=fast)
    with pytest.raises(UserError, match=r"other\.yaml: no such file"):
        verdict(run.info.run_id, Path("other.yaml"), as_json=False, measured=fast)


@pytest.mark.slow
def test_every_limit_without_a_record_is_measured(exported: Callable[[int], Path]):
    values = measure(exported(0), processes=2)
    assert values.keys() == FAST.keys()
    assert all(len(of_processes) == 2 and min(of_processes) > 0 for of_processes in values.values())
    assert max(values["p50_ms_1"]) <= max(values["p99_ms_1"])
    assert min(values[WARM]) > 0.1  # imports alone take longer


def test_model_that_cannot_answer_is_one_line(tmp_path: Path):
    wrong = write_wrong_export(tmp_path / "wrong", answers="-1 to 2")
    with pytest.raises(UserError, match="the model cannot answer: digits: its answers to 1 of 1 images are not prob"):
        measure(wrong, processes=1)
