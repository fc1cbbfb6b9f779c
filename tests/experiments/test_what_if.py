"""`gradtrail what-if` on a toy training, whose parameters are linear in the weights of its examples."""

import base64
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from factories import changed_weights, dataset_info, model_config, random_split, train_config
from PIL import Image
from ruamel.yaml import YAML

from gradtrail.core.data import Split
from gradtrail.core.gradients.what_if import make_outputs, measure_lds
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.models import Model, Params
from gradtrail.experiments import what_if
from gradtrail.experiments.compare import main
from gradtrail.experiments.what_if import Prediction
from gradtrail.stages.common.files import digest, write_json
from gradtrail.stages.common.params import as_written
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import write_processed
from gradtrail.stages.model.members import write_seeds
from gradtrail.stages.model.weights import WeightsInfo, write_weights
from gradtrail.support.errors import UserError
from gradtrail.tracking.tags import OUTS

INFO = WeightsInfo(model=model_config("linear"), loss=CROSS_ENTROPY, dataset=dataset_info(), epoch=1)
PARAMS = Path("pipeline/what_if/params.yaml")
MODEL, TRAIN, TEST, VALIDATION = Model(INFO.model), slice(0, 300), slice(300, 340), slice(340, 400)


def toy_training(train: Split, changes: jax.Array | np.ndarray) -> Params:
    """Return weights that are linear in the weights of the examples."""
    weights = jax.nn.one_hot(train.labels, INFO.model.num_classes) + changes
    pixels = train.images.reshape(len(train), -1) / np.float32(255) - np.float32(0.5)
    kernel = jnp.einsum("np,nc->pc", pixels, weights) / np.float32(10)
    return jax.tree.map(
        lambda leaf: kernel if leaf.ndim == 2 else jnp.zeros(leaf.shape, jnp.float32), MODEL.abstract_params()
    )


class Toy:
    """A project on which the stage ran, with an engine and a store in memory."""

    def __init__(self, folder: Path):
        self.begin(folder)
        split = random_split(400)
        self.splits = {"train": split[TRAIN], "validation": split[VALIDATION], "test": split[TEST]}

        # Data, params and weights
        write_processed(folder / "data/processed", self.splits, INFO.dataset)
        info = what_if.read_info(folder / "data/processed")
        self.info = dataclasses.replace(INFO, dataset=info)
        self.write_models(folder, np.zeros((300, 3), np.float32))
        section = "what_if:\n  # ids\n  test_examples: []\n  num_examples: 3\n  memory_mib: 9\n"
        (folder / PARAMS).parent.mkdir(parents=True)
        (folder / PARAMS).write_text(section)
        YAML().dump({"train": as_written(train_config())}, folder / "params.yaml")

        # The results of the stage, by the derivative of the toy's own training
        train, test = self.splits["train"], self.splits["test"]
        evaluate = jax.jit(lambda outputs, changes: outputs(toy_training(train, changes)))
        unchanged, validation = np.zeros((300, 3), np.float32), self.splits["validation"]
        margins = evaluate(make_outputs(MODEL, test, validation, 32), unchanged)[:-1]
        self.rows = np.argsort(margins)[:3]
        outputs = make_outputs(MODEL, test[self.rows], validation, 32)
        values = np.asarray(evaluate(outputs, unchanged))
        derivative = jax.jacrev(evaluate, argnums=1)(outputs, unchanged)
        names = [*map(str, test.example_id[self.rows]), "validation_loss"]
        labels, proposed, rows = train.labels, (train.labels + 1) % 3, np.arange(300)
        table = pd.DataFrame({"example_id": train.example_id, "label": labels, "proposed_label": proposed})
        for name, by_weight in zip(names, np.asarray(derivative), strict=True):
            table[f"remove/{name}"] = -by_weight[rows, labels]
            table[f"relabel/{name}"] = by_weight[rows, proposed] - by_weight[rows, labels]
        results = folder / "results/what_if"
        results.mkdir(parents=True)
        table.sample(frac=1, random_state=0).to_parquet(results / "influence.parquet", index=False)
        predicted = [*(test.labels[self.rows] + 1) % 3, None]
        columns = {"output": names, "label": [*test.labels[self.rows], None], "predicted": predicted, "value": values}
        pd.DataFrame(columns).to_csv(results / "outputs.csv", index=False)
        self.names, self.table = names, table

    def begin(self, folder: Path) -> None:
        """Forget what was trained and logged; the project is in a folder."""
        self.folder, self.failing = folder, ""
        self.runs: dict[str, Any] = {}
        self.trained: list[str] = []
        self.logged: dict[str, float] = {}

    def write_models(self, folder: Path, changes: np.ndarray) -> None:
        write_weights(folder / "models/final.safetensors", toy_training(self.splits["train"], changes), self.info)
        write_seeds(folder / "models", [0])

    # The engine

    def prepare(self) -> int:
        return 0

    def run(self, title: str, planned: Any, missing: Mapping[str, Mapping[str, Any]], stage: str) -> dict[str, str]:
        assert (title, stage) == ("what-if", "train")
        failed = {}
        for label, changes in missing.items():
            if self.failing and self.failing in label:
                failed[label] = "no space"
                continue
            fields = {key.removeprefix("train.changes."): value for key, value in changes.items()}
            place = self.folder / "elsewhere" / str(len(self.trained))
            self.write_models(place, changed_weights(self.splits["train"], **fields))
            outs = {out: self.put_into_cache(place / out) for out in what_if._WEIGHTS}
            self.runs[repr(changes)] = SimpleNamespace(data=SimpleNamespace(tags={OUTS: json.dumps(outs)}))
            self.trained.append(label)
        return failed

    def put_into_cache(self, path: Path) -> str:
        if path.is_dir():
            files = [{"md5": self.put_into_cache(file), "relpath": file.name} for file in path.iterdir()]
            content, md5 = json.dumps(files).encode(), digest(path)
        else:
            content, md5 = path.read_bytes(), digest(path)
        place = self.folder / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        return md5

    # The store

    def training(self, changes: Mapping[str, Any], accept: Callable[[Any], bool]) -> Any:
        run = self.runs.get(repr(changes))
        return run if run and accept(run) else None

    def log_metric(self, run_id: str, name: str, value: float) -> None:
        self.logged[name] = value

    def log_artifact(self, run_id: str, path: str, folder: str) -> None:
        self.logged[f"{folder}/{Path(path).name}"] = Path(path).stat().st_size


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(made: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A copy of the project, which is the working folder."""
    toy = copy.copy(made)
    toy.begin(shutil.copytree(made.folder, tmp_path / "project"))
    monkeypatch.chdir(toy.folder)
    monkeypatch.setattr(main, "comparison_lock", contextlib.nullcontext)
    run = SimpleNamespace(info=SimpleNamespace(run_id="0"))
    for name, value in {
        "reproduce": lambda targets: int(targets[0] != "pipeline/what_if/dvc.yaml"),
        "read_store": lambda: toy,
        "open_store": lambda: toy,
        "find_equivalent_run": lambda find, stage: run,
        "_MAX_SUPPORTERS": 0.1,
        "measure_lds": functools.partial(measure_lds, resamples=50),
    }.items():
        monkeypatch.setattr(what_if, name, value)
    return toy


def run(toy: Toy, **options: Any) -> int:
    return what_if.what_if(
        toy, **{"test": (), "drop": None, "suspects": False, "subsets": 5, "fraction": 0.01} | options
    )


def results() -> pd.DataFrame:
    return pd.read_csv("results/comparisons/what_if.csv", dtype={"output": str}).set_index(["intervention", "output"])


def test_predictions_of_a_nearly_linear_training_hold(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = dataclasses.replace(what_if.read_prediction(), classes=("<b>", "<img src=//h/x.png>", "c"))
    monkeypatch.setattr(what_if, "read_prediction", lambda: prediction)
    assert run(toy) == 0
    table = results()
    subsets = table[table["kind"] == "subset"]
    assert (subsets["examples"] == 3).all()
    np.testing.assert_allclose(subsets["predicted"], subsets["retrained"], atol=0.01)
    assert np.ptp(subsets["retrained"] - subsets["before"]) > 0.05
    supporters = table[table["kind"] == "supporters"]
    assert len(supporters) == 4 * 3
    for test in toy.names[:-1]:
        row = supporters.loc[(test, test)]
        assert row["before"] < 0 < row["predicted"]
    output = capsys.readouterr().out
    assert output.startswith("LDS 1.00 (95 % interval 1.00 to 1.00): mean rank correlation")
    assert output.count("retrained, it did (+") + output.count("retrained, its margin keeps its sign (-") == 3
    assert toy.logged["what_if/lds"] == pytest.approx(1)
    assert {*toy.logged} == {"what_if/lds", *(f"results/comparisons/what_if.{end}" for end in ("csv", "html"))}

    # The page shows the examples for and against each label
    page = Path("results/comparisons/what_if.html").read_text()
    encoded = re.findall(r'<td><img src="data:image/png;base64,([^"]*)"', page)
    shown = [255 - np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in encoded]
    influence, expected = toy.table.set_index("example_id"), []
    for name, row in zip(toy.names, toy.rows, strict=False):
        ranked = influence[f"remove/{name}"].sort_values(kind="stable").index
        strongest = [*ranked[:6], *ranked[:-7:-1]]  # the example_id of the training split is the position
        expected += [toy.splits["test"].images[row], *toy.splits["train"].images[strongest]]
    np.testing.assert_array_equal(shown, expected)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert "<img src=//h/x.png>" not in page, "it loads nothing that the name of a class names"
    assert "<b>" not in page


def test_report_of_these_weights_alone_shows_the_sentences(toy: Toy) -> None:
    folder, style = Path("results/evaluate"), Path("results/comparisons/what_if.css")
    folder.mkdir()
    weights = "models/final.safetensors"
    error = {"expected_calibration_error": {"value": 0.0, "low": 0.0, "high": 0.0}}
    for md5 in ("another", digest(Path(weights))):
        content = {"calibrated": error, "temperature": 1, "members": [{"weights": weights, "weights_digest": md5}]}
        (folder / "calibration.json").write_text(json.dumps(content))
        assert run(toy) == 0
        assert style.exists() == (md5 != "another")
    text = style.read_text()
    assert text.startswith(f':root[data-evaluation="{digest(folder / "calibration.json")}"] #what-if {{')
    assert [text.count(f"Test example {name} (label") for name in toy.names[:-1]] == [1, 1, 1]


def test_second_call_trains_only_what_is_new_and_examples_without_few_supporters_are_named(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(what_if, "_MAX_SUPPORTERS", 0.01)
    assert run(toy) == 0
    sentence = ": no removal of at most 3 of 300 examples is predicted to change the answer.\n"
    assert capsys.readouterr().out.count(sentence) == 3
    before = [f"seed {seed}" for seed in range(5)]
    assert toy.trained == before
    md5 = digest(Path("elsewhere/0/models/final.safetensors"))
    Path(".dvc/cache/files/md5", md5[:2], md5[2:]).unlink()
    assert run(toy, subsets=6) == 0
    assert toy.trained == [*before, "seed 0", "seed 5"], "weights that the cache lost are made again"


def test_dropped_file_and_suspects_are_interventions(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    Path("drop.csv").write_text("why,example_id\nblurred,7\nblurred,3\ntwice,7\n")
    Path("results/gradients").mkdir()
    names = range(20, 40)
    split = ["test", *["train"] * 19]
    pd.DataFrame({"split": split, "example_id": names}).to_csv("results/gradients/suspects.csv", index=False)
    assert run(toy, drop=Path("drop.csv"), suspects=True) == 0
    table = results()
    assert table.loc[("drop drop.csv", toy.names[0]), "examples"] == 2
    effect = toy.table[toy.table["example_id"].isin([3, 7])][f"remove/{toy.names[0]}"].sum()
    row = table.loc[("drop drop.csv", toy.names[0])]
    assert row["predicted"] - row["before"] == pytest.approx(effect, abs=1e-4)
    suspects = table[table["kind"] == "suspect"].index.unique("intervention")
    assert [name.split()[0] for name in suspects] == [str(name) for name in range(21, 31)]
    expected = toy.table.set_index("example_id").loc[21]
    assert suspects[0] == f"21 as {expected['proposed_label']:.0f}"
    row = table.loc[(suspects[0], "validation_loss")]
    assert row["predicted"] - row["before"] == pytest.approx(expected["relabel/validation_loss"], abs=1e-5)
    assert row["predicted"] == pytest.approx(row["retrained"], abs=1e-3)
    assert not (table["kind"] == "supporters").any()
    output = capsys.readouterr().out
    assert "Test example" not in output
    assert output.count("\n| drop drop.csv | ") == 4
    assert output.count(" | validation_loss | ") == 1 + 10


def test_what_was_trained_is_reported_beside_what_failed(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.failing = toy.names[0]
    assert run(toy) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"{toy.names[0]}: failed; no space\n")
    assert [f"Test example {name} " in output.out for name in toy.names[:-1]] == [False, True, True]
    assert toy.names[0] not in results().index.unique("intervention")
    page, toy.failing = Path("results/comparisons/what_if.html"), "seed 1"
    page.unlink()
    assert run(toy, subsets=3, fraction=0.02) == 1
    assert not page.exists(), "two subsets are too few for a report"


def test_fraction_that_removes_nothing_is_refused(toy: Toy) -> None:
    with pytest.raises(UserError, match=r"^--fraction must remove one of 300 examples, got 0\.001$"):
        run(toy, fraction=0.001)
    assert toy.trained == []


def test_fewest_supporters_are_those_of_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_MAX_SUPPORTERS", 0.5)
    rng = np.random.default_rng(0)
    split, counts = random_split(8), []
    for case in range(40):
        effects, margin = rng.normal(size=8), rng.normal() * 2
        prediction = Prediction(
            outputs=pd.DataFrame({"value": [margin, 0.0]}, index=["5", "validation_loss"]),
            influence=pd.DataFrame({"remove/5": effects}, index=np.arange(8) * 3),
            splits={"train": split},
            classes=("a", "b", "c"),
        )
        sizes = [
            size
            for size in range(1, 5)
            if any((margin + effects[[*rows]].sum()) * margin < 0 for rows in itertools.combinations(range(8), size))
        ]
        supporters = prediction.supporters("5")
        counts.append(len(supporters))
        assert len(supporters) == min(sizes, default=0), case
        if supporters:
            assert (margin + prediction.influence.loc[[*supporters], "remove/5"].sum()) * margin < 0
    assert {*counts} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("id\n3\n", "example_id"),
        ("example_id\n", "it has no row"),
        ("example_id\nthree\n", "three"),
        ("example_id\n1.5\n", "int64"),
        ("example_id\n3\n\n\n777\n", "no example 777 in the training split, which has 300 of 0 to 299"),
        (b"example_id\n\xff\n", "utf-8"),
    ],
)
def test_invalid_file_to_drop_is_one_line(toy: Toy, content: str | bytes | None, message: str) -> None:
    if content is not None:
        Path("drop.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as raised:
        run(toy, drop=Path("drop.csv"))
    assert str(raised.value).startswith("--drop: drop.csv: must be a CSV file with a column example_id of training")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_chosen_test_examples_are_written_to_the_params_before_dvc_whose_status_is_returned(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = PARAMS.read_text()
    with pytest.raises(ValueError, match=r"^--test: no example 5 in the test split, which has 40 of 300 to 339$"):
        run(toy, test=(5,))
    with pytest.raises(UserError, match=r"^--test\.test_examples: number of them must be at most 40"):
        run(toy, test=range(300, 341))
    assert PARAMS.read_text() == before
    monkeypatch.setattr(what_if, "reproduce", lambda targets: 255)
    tests = [int(name) for name in toy.names[:-1]]
    items = "".join(f"  - {name}\n" for name in tests)
    expected = before.replace("test_examples: []\n", f"test_examples:\n{items}")
    for chosen, message in (
        ([*tests, tests[0]], f"what_if.test_examples in pipeline/what_if/params.yaml is now {tests}.\n"),
        (tests, ""),
    ):
        assert run(toy, test=chosen) == 255
        assert (PARAMS.read_text(), capsys.readouterr().err) == (expected, message)
    assert toy.trained == []


def test_training_that_is_not_metasmooth_is_refused(toy: Toy) -> None:
    Path("results/what_if/influence.parquet").unlink()
    write_json(Path("results/metrics/what_if.json"), {"metasmoothness": 0.3125})
    with pytest.raises(UserError, match=r"^metasmoothness 0\.31, below 0\.9: .* the recipe `what_if` "):
        run(toy)
    assert toy.trained == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer", "muon", r"^what_if: train\.optimizer must be one of sgd, .*, got muon$"),
        (
            "changes",
            {"omit": [3], "omit_fraction": 0.0, "omit_seed": 0, "relabel": []},
            r"^what_if: train\.changes must",
        ),
    ],
)
def test_training_without_a_derivative_is_refused_before_dvc_starts(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    monkeypatch.delattr(what_if, "reproduce")
    params = read_yaml(Path("params.yaml"))
    params["train"] |= as_written(train_config(optimizer="muon")) if key == "optimizer" else {key: value}
    YAML().dump(params, Path("params.yaml"))
    with pytest.raises(ValueError, match=message):
        run(toy)
