"""Which run stands for a state, which run wrote a file, and which key a member of a training has."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import train_config
from mlflow.entities import Param, Run, RunData, RunInfo, RunTag

from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.start import NO_START
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.support.errors import UserError
from gradtrail.tracking import find_run as lookup
from gradtrail.tracking import links
from gradtrail.tracking.runs import find_equivalent_run
from gradtrail.tracking.state import Experiment, RecordedState, Snapshot
from gradtrail.tracking.tags import OUTS as OUTS_TAG
from gradtrail.tracking.tags import START, START_RUN

OUTS = {"models/export": "e" * 32, "results/metrics/export.json": "1" * 32}
PIPELINE = {
    "evaluate": StageSpec(
        cmd="run evaluate", deps=("code.py",), params={"params.yaml": ("evaluate",)}, outs=("results/evaluate",)
    ),
    "export": StageSpec(
        cmd="run export",
        deps=("code.py", "results/evaluate"),
        params={"params.yaml": ("export",)},
        outs=tuple(OUTS),
    ),
}
PARAMS = {"evaluate.bins": "15", "export.format": "onnx"}


def state(*, code: str = "new", bins: int = 15, evaluated: str = "a") -> RecordedState:
    """The export of a lock that names this code, evaluation and number of bins."""

    def section(stage: str, params: dict[str, Any], deps: dict[str, str], outs: Mapping[str, str]) -> dict[str, Any]:
        return {
            "cmd": f"run {stage}",
            "params": {"params.yaml": {stage: params}},
            "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
            "outs": [{"path": path, "md5": md5} for path, md5 in outs.items()],
        }

    lock = {
        "evaluate": section("evaluate", {"bins": bins}, {"code.py": code}, {"results/evaluate": evaluated}),
        "export": section("export", {"format": "onnx"}, {"code.py": code, "results/evaluate": evaluated}, OUTS),
    }
    return RecordedState("export", snapshot=Snapshot(pipeline=PIPELINE, lock=lock))


def run_of(stage: RecordedState, params: Mapping[str, str], outs: Mapping[str, str] = OUTS) -> Run:
    info = RunInfo(
        run_id="r", experiment_id="1", user_id="", status="FINISHED", start_time=1, end_time=2, lifecycle_stage="active"
    )
    tags = {"stage": stage.name, "state": stage.state, OUTS_TAG: json.dumps(dict(outs))}
    return Run(
        info,
        RunData(
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        ),
    )


def is_found(stage: RecordedState, run: Run) -> bool:
    def find(tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        return [run] if tags.items() <= run.data.tags.items() else []

    return find_equivalent_run(find, stage) is run


def test_run_represents_its_own_state_and_another_with_the_same_result() -> None:
    assert is_found(state(), run_of(state(), PARAMS))
    assert not is_found(state(), run_of(state(), PARAMS, {"models/export": "f" * 32})), "it has another result"
    before = run_of(state(code="old"), PARAMS, OUTS | {"results/costs/export.json": "2" * 32})
    assert is_found(state(), before), "edits of code change costs"
    assert not is_found(state(), run_of(state(code="old"), PARAMS, OUTS | {"results/metrics/export.json": "2" * 32}))
    assert not is_found(state(), run_of(state(), PARAMS, {})), "its stage did not finish"
    assert not is_found(state(), run_of(state(code="old"), PARAMS, OUTS | {"models/export": "f" * 32}))
    assert not is_found(state(), run_of(state(code="old"), PARAMS | {"export.format": "safetensors"}))


@pytest.mark.parametrize(("params", "expected"), [({"evaluate.bins": "7"}, False), ({}, True)])
def test_params_of_the_stages_before_make_another_result(params: dict[str, str], expected: bool) -> None:
    """They may, if all outs are the same. A param that only one of the two has does not count."""
    other = run_of(state(bins=7, evaluated="b"), {"export.format": "onnx"} | params)
    assert is_found(state(), other) == expected


LOCK = "state-of-the-lock"


def run(name: str, state: str, outs: dict[str, str]) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(run_id=name),
        data=SimpleNamespace(tags={"state": state, OUTS_TAG: json.dumps(outs)}),
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`models/final.safetensors` of a repository whose lock has one state."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "models/final.safetensors"
    path.write_text("weights")
    monkeypatch.setattr(lookup, "working_snapshot", lambda: "a lock")
    monkeypatch.setattr(lookup, "consistent_stages", lambda _: [SimpleNamespace(name="train", state=LOCK)])
    return path


def keep(folder: Path, files: dict[str, str]) -> str:
    """Put the listing of a folder into the cache; return its digest."""
    md5 = "12" * 16 + ".dir"
    path = folder / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{"relpath": name, "md5": item} for name, item in files.items()]))
    return md5


def test_a_file_is_of_the_run_in_the_lock_if_several_wrote_its_bytes(weights: Path, tmp_path: Path) -> None:
    md5 = digest(weights)
    epochs = keep(tmp_path, {"002.safetensors": md5})
    outs = {"models/epochs": epochs, "models/final.safetensors": md5}
    both = [run("newer", "another", outs), run("older", LOCK, outs)]
    assert [item.info.run_id for item in lookup._writers(weights, both)] == ["older"]
    assert [item.info.run_id for item in lookup._writers(weights, both[:1])] == ["newer"]
    with pytest.raises(UserError, match="no run wrote these bytes"):
        lookup._writers(weights, [run("one", LOCK, {"models/final.safetensors": "0" * 32})])


def test_training_from_weights_is_linked_to_the_newest_run_that_wrote_them() -> None:
    final = {"models/final.safetensors": "a" * 32}
    runs, tagged = [run("newer", "1", final), run("older", "2", final), run("other", "3", OUTS)], list[tuple]()
    client: Any = SimpleNamespace(set_tag=lambda *arguments: tagged.append(arguments))
    find: Any = lambda tags: runs if tags == {} else []  # noqa: E731
    for md5 in ("a" * 32, "e" * 32, "0" * 32, None):
        tuned = run(f"from {md5}", "4", {})
        tuned.data.tags |= {START: md5} if md5 else {}
        links._link_start(client, tuned, find)
    assert tagged == [(f"from {'a' * 32}", START_RUN, "newer"), (f"from {'e' * 32}", START_RUN, "other")]


SPEC = StageSpec(cmd="train", deps=("code.py",), params={"params.yaml": ("train",)}, outs=("models",))


def training(config: TrainConfig) -> RecordedState:
    section = {name: getattr(config, name) for name in ("seed", "members", "epochs")}
    section["start"] = dataclasses.asdict(config.start)
    params = {"params.yaml": {"train": section | {"vary": [*config.vary]}}}
    lock = {"train": {"cmd": "train", "params": params, "deps": [{"path": "code.py", "md5": "c"}]}}
    return RecordedState("train", snapshot=Snapshot(pipeline={"train": SPEC}, lock=lock))


def keys(config: TrainConfig) -> list[str]:
    """Return the key of each member."""
    seeds = [dataclasses.asdict(config.seeds_of(seed)) for seed in config.seeds]
    identity = training(config)
    return [
        identity.member_state({name: seed for name, seed in member.items() if seed is not None}) for member in seeds
    ]


def test_member_has_the_key_of_the_training_of_its_seed_alone() -> None:
    alone = [training(train_config(seed=seed)).state for seed in (3, 4, 5)]
    assert keys(train_config(seed=3, members=3)) == alone
    configs = [
        train_config(seed=0, members=3),
        train_config(seed=0, members=2, vary=("order",)),
        train_config(seed=0, members=2, epochs=3),
    ]
    keys_of_members = {key for config in configs for key in keys(config)}
    assert len(keys_of_members) == 3 + 1 + 2, "the first member that varies in its order alone is that of seed 0"


def test_variant_is_the_same_for_seeds_alone() -> None:
    configs = [train_config(seed=0), train_config(seed=1), train_config(seed=0, epochs=3), train_config(members=3)]
    starts = [dataclasses.replace(NO_START, weights="w", sha256=digits * 64) for digits in "01"]
    configs += [train_config(start=start) for start in starts]  # the same path, with other content
    keys_of_variants = [training(config).variant for config in configs]
    assert keys_of_variants[0] == keys_of_variants[1]
    assert len({*keys_of_variants, *(training(config).state for config in configs)}) == 5 + 6


def test_experiment_without_a_run_is_not_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(name="saved", baseline="b" * 40, commit="c" * 40)
    monkeypatch.setattr(lookup, "find_experiments", lambda: [experiment])
    monkeypatch.setattr(lookup, "snapshot_of", lambda _: None)
    with pytest.raises(UserError, match=r"^saved: a DVC experiment without a run; `gradtrail sync` adds it"):
        lookup.look_up("saved", [])
    with pytest.raises(UserError, match=r"^save: no run has this name"):
        lookup.look_up("save", [])
