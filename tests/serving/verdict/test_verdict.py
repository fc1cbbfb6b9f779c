"""`gradtrail verdict` on a store: planted faults fail exactly their limits; measuring in fresh processes."""

import json
import math
import operator
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from exports import write_wrong_export
from factories import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run
from registered import evaluation, training

from gradtrail.core.intervals import Interval, median_interval, share_interval
from gradtrail.serving.release.promote import promote
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict import probe
from gradtrail.serving.verdict.judge import KINDS, Measured
from gradtrail.serving.verdict.main import verdict
from gradtrail.serving.verdict.measure import COLD, WARM, measure, measured
from gradtrail.stages.artifacts.exported import ExportedModel
from gradtrail.support.errors import UserError
from gradtrail.tracking.store import StoreClient

LABELS = np.arange(2000) % 10
_FAST = {
    "memory_mib": 300.0,
    "cold_start_seconds": 2.0,
    "first_answer_ms": 1.0,
    "p50_ms_1": 0.2,
    "p99_ms_1": 0.5,
    "p50_ms_32": 0.4,
    "p99_ms_32": 1.0,
    "images_per_second": 200_000.0,
    WARM: 1.5,
}


def fast(folder: Path, **slower: float) -> dict[str, Measured]:
    assert (folder / "manifest.json").is_file()
    return {
        name: measured([value * factor for factor in np.linspace(0.9, 1.1, 6)])
        for name, value in (_FAST | slower).items()
    }


@pytest.fixture
def run(client: MlflowClient, exported: Callable[[int], Path]) -> Run:
    """An evaluated training, right about 1,980 of 2,000 examples."""
    Path("deploy").mkdir()
    shutil.copy(ROOT / "deploy/slo.yaml", "deploy")
    made = training(client, seed=1, export=exported(1))
    evaluate(client, made, predictions(20))
    return made


def evaluate(client: MlflowClient, run: Run, predicted: np.ndarray) -> None:
    """Log an evaluation with a confidence of 0.99, and an export with its metrics."""
    evaluation(client, run, predicted, labels=LABELS, confidence=0.99)
    hits = predicted == LABELS
    error = abs(0.99 - hits.mean())
    measured = {
        "accuracy": share_interval(int(hits.sum()), len(hits)),
        "worst_class_recall": min(
            (share_interval(int(hits[k == LABELS].sum()), 200) for k in range(10)), key=operator.attrgetter("low")
        ),
        "expected_calibration_error": Interval(value=error, low=error, high=error),
    }
    log_export_metrics(client, run, measured)


def log_export_metrics(client: MlflowClient, run: Run, measured: Mapping[str, Interval]) -> None:
    tags = {"stage": "export", "state": "x", "mlflow.parentRunId": run.info.run_id}
    child = client.create_run(run.info.experiment_id, tags=tags)
    for name, interval in measured.items():
        for key, value in {"": interval.value, "_low": interval.low, "_high": interval.high}.items():
            client.log_metric(child.info.run_id, f"export/{name}{key}", value)
    client.set_terminated(child.info.run_id)


def predictions(wrong: int) -> np.ndarray:
    """Predictions of which some are wrong, spread over the classes."""
    predicted = LABELS.copy()
    predicted[:wrong] = (predicted[:wrong] + 1) % 10
    return predicted


def judged(run: Run, capsys: pytest.CaptureFixture, **slower: float) -> dict:
    status = verdict(
        run.info.run_id, Path("deploy/slo.yaml"), as_json=True, measured=lambda folder: fast(folder, **slower)
    )
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == ("pass" if status == 0 else "fail")
    return content


def failed(content: dict) -> set[str]:
    return {name for name, line in content["limits"].items() if line["pass"] is False}


def test_good_model_passes_and_every_number_has_an_interval(
    client: MlflowClient, run: Run, capsys: pytest.CaptureFixture
):
    content = judged(run, capsys)
    assert content["verdict"] == "pass"
    assert content["limits"].keys() == KINDS.keys()
    assert content["limits"]["agreement"]["verdict"] == "not judged: there is no champion"
    for name, line in content["limits"].items():
        if name != "agreement":
            assert line["low"] <= line["value"] <= line["high"], name
            assert line["how"], name
            assert line["margin"] >= 0, name
    accuracy = content["limits"]["accuracy_lower_bound"]
    expected = share_interval(1980, 2000)
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((expected.low, expected.high))
    assert content["limits"]["worst_class_recall"]["value"] == pytest.approx(0.99)
    assert content["limits"]["calibration_error"]["value"] == pytest.approx(0.0, abs=1e-6)


def test_run_has_json_table_and_tag_but_no_metric(
    client: MlflowClient, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
):
    content = judged(run, capsys)
    stored = client.get_run(run.info.run_id)
    assert stored.data.metrics == {}
    limits = read_slo().limits.digest
    assert stored.data.tags["verdict"] == f"pass: export {content['export_digest']}, limits {limits}"
    paths = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "verdict")}
    assert paths == {"verdict/verdict.json"}
    folder = client.download_artifacts(run.info.run_id, "tables", str(tmp_path))
    table = json.loads((Path(folder) / "verdict.json").read_text())
    assert table["columns"] == ["limit", "value", "95 % interval", "must be", "margin", "verdict"]
    assert table["data"][0] == ["accuracy", "99.00 %", "98.46 to 99.35 %", "at least 97.50 %", "+0.96 points", "pass"]
    assert ["peak memory", "300 MiB", "270 to 330 MiB", "at most 768 MiB", "+438 MiB (+57%)", "pass"] in table["data"]
    assert ["size of the files", "exact"] in [[row[0], row[2]] for row in table["data"]]
    judged(run, capsys, p99_ms_1=100.0)
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["verdict"].startswith("fail: ")
    assert len(json.loads(tags["mlflow.loggedArtifacts"])) == 1


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (
            {"p50_ms_1": 50.0, "p99_ms_1": 80.0, "images_per_second": 100.0},
            {"p50_ms_1", "p99_ms_1", "images_per_second"},
        ),
        ({"cold_start_seconds": 60.0}, {"cold_start_seconds"}),
        ({"memory_mib": 5000.0}, {"memory_mib"}),
        ({"p99_ms_32": 19.0}, {"p99_ms_32"}),  # the median keeps 20, the upper end 20.9 does not
    ],
)
def test_slow_model_fails_exactly_its_limits(
    run: Run, capsys: pytest.CaptureFixture, slower: dict[str, float], expected: set[str]
):
    assert failed(judged(run, capsys, **slower)) == expected


def test_wrong_model_fails_exactly_its_limits(
    client: MlflowClient, run: Run, exported: Callable[[int], Path], capsys: pytest.CaptureFixture
):
    wrong = training(client, seed=2, export=exported(2))
    evaluate(client, wrong, predictions(1000))
    assert failed(judged(wrong, capsys)) == {"accuracy_lower_bound", "calibration_error", "worst_class_recall"}
    one_class = training(client, seed=3, export=exported(3))
    predicted = np.where((LABELS == 7) & (np.arange(2000) < 220), 1, LABELS)  # 22 of the 200 sevens
    evaluate(client, one_class, predicted)
    content = judged(one_class, capsys)
    assert failed(content) == {"worst_class_recall"}
    assert content["limits"]["accuracy_lower_bound"]["value"] == pytest.approx(0.989)
    assert content["limits"]["worst_class_recall"]["value"] == pytest.approx(0.89)


def test_agreement_with_the_champion_is_judged(
    client: MlflowClient, run: Run, exported: Callable[[int], Path], capsys: pytest.CaptureFixture
):
    judged(run, capsys)
    assert promote(run.info.run_id, as_champion=True, is_forced=False, reason="") == 0
    capsys.readouterr()
    assert judged(run, capsys)["limits"]["agreement"]["verdict"] == "not judged: this is the champion"
    for seed, differing, is_kept in ((2, 20, True), (3, 90, False)):
        other = training(client, seed=seed, export=exported(seed))
        predicted = predictions(20)
        predicted[100 : 100 + differing] = (predicted[100 : 100 + differing] + 1) % 10
        evaluate(client, other, predicted)
        line = judged(other, capsys)["limits"]["agreement"]
        assert line["pass"] is is_kept
        expected = share_interval(2000 - differing, 2000)
        assert (line["low"], line["high"]) == pytest.approx((expected.low, expected.high))


def test_concurrent_verdicts_under_different_limits_do_not_mix(
    client: MlflowClient, run: Run, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    slo = Path("deploy/slo.yaml").read_text()
    Path("strict.yaml").write_text(slo.replace("p99_ms_1: 10.0", "p99_ms_1: 0.001"))
    set_tag, writes = StoreClient.set_tag, list[str]()

    def set_after_another_verdict(self: StoreClient, run_id: str, key: str, value: str) -> None:
        writes.extend([key] if key.startswith("verdict") else [])
        if len(writes) == 1:
            writes.append("another verdict")
            assert verdict(run_id, Path("strict.yaml"), as_json=True, measured=fast) == 1
        set_tag(self, run_id, key, value)

    monkeypatch.setattr(StoreClient, "set_tag", set_after_another_verdict)
    assert verdict(run.info.run_id, Path("deploy/slo.yaml"), as_json=True, measured=fast) == 0
    Path("deploy/slo.yaml").write_text(Path("strict.yaml").read_text())
    assert promote(run.info.run_id, as_champion=True, is_forced=False, reason="") == 1


def test_accuracy_and_calibration_come_from_the_export(
    client: MlflowClient, run: Run, exported: Callable[[int], Path], capsys: pytest.CaptureFixture
):
    bare = training(client, seed=2, export=exported(2))
    evaluation(client, bare, predictions(20), labels=LABELS, confidence=0.99)
    content = judged(bare, capsys)
    assert failed(content) == {"accuracy_lower_bound", "calibration_error", "worst_class_recall"}
    assert "the run of `export` has no such metric" in content["limits"]["calibration_error"]["verdict"]
    log_export_metrics(client, bare, {"accuracy": Interval(value=0.5, low=0.4, high=0.6)})
    assert judged(bare, capsys)["limits"]["accuracy_lower_bound"]["value"] == 0.5


def test_terminal_shows_every_limit(run: Run, capsys: pytest.CaptureFixture):
    status = verdict(
        "mlp 1", Path("deploy/slo.yaml"), as_json=False, measured=lambda folder: fast(folder, p50_ms_1=9.0)
    )
    output = capsys.readouterr().out
    assert status == 1
    for kind in KINDS.values():
        assert kind.title in output
    assert "verdict: fail: p50, 1 image" in output
    assert "start to first answer with a warm compilation cache: 1.50 s 1.35 to 1.65 s, no limit" in output


def test_bad_input_is_one_line(run: Run):
    with pytest.raises(UserError, match="no run has this name"):
        verdict("nowhere", Path("deploy/slo.yaml"), as_json=False, measured=fast)
    with pytest.raises(UserError, match=r"other\.yaml: no such file"):
        verdict(run.info.run_id, Path("other.yaml"), as_json=False, measured=fast)


RECORDED = {"accuracy_lower_bound", "calibration_error", "worst_class_recall", "agreement", "size_mib"}  # from files


@pytest.mark.slow
def test_every_limit_without_a_record_is_measured(exported, tmp_path: Path):
    numbers = measure(exported(0), processes=2)
    assert KINDS.keys() - RECORDED <= numbers.keys()
    for name, number in numbers.items():
        assert len(number.values) == 2, name
        assert number.value > 0, name
        assert math.isinf(number.high), name  # of two processes there is no upper end
    assert numbers["p50_ms_1"].value <= numbers["p99_ms_1"].value
    assert numbers["p50_ms_1"].value < 1000 * numbers[WARM].value
    assert min(numbers[WARM].values) > 0.1  # imports alone take longer
    assert set(numbers) >= {COLD, WARM}


def test_model_that_cannot_answer_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=rf"the model cannot answer: {tmp_path}/manifest\.json: no such file"):
        measure(tmp_path, processes=1)
    wrong = write_wrong_export(tmp_path / "wrong", answers="-1 to 2")
    with pytest.raises(UserError, match="the model cannot answer: digits: its answers to 1 of 1 images are not prob"):
        measure(wrong, processes=1)


def test_every_batch_size_is_run(exported, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    predict = ExportedModel.predict

    def recorded(self: ExportedModel, images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        return predict(self, images)

    monkeypatch.setattr(ExportedModel, "predict", recorded)
    monkeypatch.setattr(probe, "_timed", lambda *_, **__: [0.001])
    probe.steady(exported(0))
    assert sizes == [1, 1, 32]


def test_six_processes_have_the_range_as_the_interval_of_their_median():
    number = measured([5, 1, 4, 2, 6, 3])
    assert (number.low, number.value, number.high) == (1, 3.5, 6)


def test_interval_over_processes_covers_the_median_and_that_over_answers_does_not():
    """Each process is slow or fast as a whole: the answers of one process do not tell of the next one's."""
    rng = np.random.default_rng(0)
    held, held_by_answers = [], []
    for _ in range(400):
        speeds = np.exp(rng.normal(0, 0.2, 6))
        answers = speeds[:, None] * rng.lognormal(0, 0.1, (6, 40))
        interval = measured([float(np.median(process)) for process in answers])
        held.append(interval.low <= 1 <= interval.high)
        median = median_interval(answers.ravel().tolist())
        held_by_answers.append(median.low <= 1 <= median.high)
    assert np.mean(held) >= 0.93
    assert np.mean(held_by_answers) < 0.5
