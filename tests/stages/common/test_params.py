"""A mistake in `params.yaml` is one line with key, value and allowed values; blocks not chosen are inactive."""

import copy
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import fuzzing
import jax
import pytest
from dvc.utils.hydra import apply_overrides
from factories import NETWORKS, OPTIMIZERS, ROOT, SCHEDULES
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, Network
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import TrainingFunctions
from gradtrail.core.train.optimizers import Optimizer
from gradtrail.core.train.schedules import Schedule
from gradtrail.experiments.param_classes import SECTIONS
from gradtrail.stages.common.params import (
    SHARED_BLOCKS,
    active_params,
    as_overrides,
    as_written,
    flatten,
    load_section,
    params_file,
    read_params,
    validate,
)
from gradtrail.stages.common.params import changed as changed_params
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

GONE = object()
PARAMS = read_params(ROOT)
TRAIN = PARAMS["train"]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    whole: int
    real: float
    flag: bool
    maybe: float | None


def refusal(value: Any, section: str = "train") -> str:
    """Return what a section is refused with, after `params.yaml: `."""
    line = fuzzing.refusal(lambda: validate(value, SECTIONS[section], f"params.yaml: {section}")) or ""
    assert line.startswith(f"params.yaml: {section}.")
    return line.removeprefix("params.yaml: ")


def changed(key: str, value: Any, section: str = "train") -> dict[str, Any]:
    """Return a section of the repository's params with one value replaced, or left out, by dotted key."""
    outer, _, inner = key.rpartition(".")
    content = copy.deepcopy(PARAMS[section])
    block = content[outer] if outer else content
    block[inner] = value
    if value is GONE:
        del block[inner]
    return content


# The blocks of kinds that params.yaml does not choose
KINDS = itertools.chain(*map(get_args, (Network, Optimizer, Schedule, Loss)))
UNCHOSEN = {kind.kind for kind in KINDS} - {TRAIN[key] for key in ("model", "optimizer", "schedule", "loss")}


def test_sections_of_the_repository_load() -> None:
    for section, into in SECTIONS.items():
        loaded = load_section(section, into, ROOT / params_file(section))
        assert as_written(loaded).keys() == PARAMS[section].keys() - UNCHOSEN


REFUSALS = {
    ("epochs", "10"): ": Input should be a valid integer, got '10'",
    ("epochs", 0): " must be at least 1 and at most 100,000, got 0",
    ("epochs", GONE): " is missing",
    ("epoch", 1): " is not a known key; did you mean 'epochs'?",
    ("adamw.learning_rate", "fast"): ": Input should be a valid number, got 'fast'",
    ("accumulation_steps", 3): " must divide batch_size 128, got 3",
    ("cnn.kernel_size", 4): " must be odd, got 4",
    ("piecewise.boundaries", (0.5, 0.25)): "",
    ("model", "transformer"): ": Input should be 'linear', 'mlp', 'cnn'",
    ("keep_epochs", 3): ": Input should be a valid array, got 3",
    ("cross_entropy.class_weights", "even"): ": Input should be 'balanced' or a valid array, got 'even'",
    ("normalization", "pixels"): ": Input should be 'channels' or a valid array, got 'pixels'",
    ("resnet.patch", 3): ": Input should be 1, 2, 4 or 8, got 3",
    ("resnet.groups", 5): " must divide every one of channels [32, 64, 128], got 5",
    ("changes.omit", ("five",)): ".0: Input should be a valid integer, got 'five'",
    ("changes.omit_fraction", 1.0): " must be at least 0 and below 1, got 1.0",
    ("changes.relabel", ((5, 3), (6,))): ".1",
    ("changes.relabel", ((5, 3, 1),)): ".0",
    ("mlp.hidden", "256"): ": Input should be a valid array, got '256'",
    ("mlp.hidden_", 1): " is not a known key; did you mean 'hidden'?",
    ("mlp", GONE): " is missing",
    ("mlp", None): ": must have keys such as hidden, got None",
    ("sgd.nesterov", 1): ": Input should be a valid boolean, got 1",
    ("sgd.nesterov", GONE): " is missing",
    ("runtime:alert", "curl ${ALERT_URL}"): " must name a variable as $NAME",
    ("preprocess:corrections", "tset"): ": Input should be False, True or 'test', got 'tset'",
    ("fetch:pictures.size", (32,)): " must be a height and a width, such as [32, 32]; got [32]",
}


@pytest.mark.parametrize(("key", "value"), REFUSALS)
def test_refusal_is_one_line_with_key_value_and_what_is_allowed(key: str, value: Any) -> None:
    section, _, within = key.rpartition(":")
    section = section or "train"
    assert refusal(changed(within, value, section), section).startswith(f"{section}.{within}{REFUSALS[key, value]}")


SWITCHES = {"model": NETWORKS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "precision": get_args(Precision)}


@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, kinds in SWITCHES.items() for kind in kinds])
def test_one_override_of_the_repositorys_params_switches_each_kind(key: str, kind: str) -> None:
    config = validate(changed(key, kind), TrainConfig, "train")
    training = TrainingFunctions(config, Model(config.model_config((28, 28), 10)), 300, jax.devices())
    assert training.abstract_state.params


def test_numbers_booleans_and_dates_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    path, text = tmp_path / "params.yaml", "section:\n  whole: 10\n  real: 1e-3\n  flag: true\n  maybe: null\n"
    path.write_text(text)
    assert load_section("section", Numbers, path) == Numbers(whole=10, real=1e-3, flag=True, maybe=None)
    for word in ("yes", "on", "off"):
        path.write_text(text.replace("true", word))
        with pytest.raises(UserError, match=r"section\.flag"):
            load_section("section", Numbers, path)
    path.write_text("report:\n  title: 2001-02-03\n  other: 2001-02-03T04:05:06Z\n")
    assert read_yaml(path) == {"report": {"title": "2001-02-03", "other": "2001-02-03T04:05:06Z"}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected sections by name, got NoneType"),
        (b"- list\n", "expected sections by name, got list"),
        (b"a: [1\n", "not readable as YAML: "),
        (b"<<<<<<< HEAD\na: 1\n=======\na: 2\n>>>>>>> theirs\n", "not readable as YAML: "),
        (b"a: 1\na: 2\n", "duplicate key"),
        (b"a: \xfc\n", "not UTF-8 at byte 3; save it as UTF-8"),
        (b"a: !!python/object:os.system x\n", "could not determine a constructor"),
    ],
)
def test_file_that_is_no_yaml_of_sections_is_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    line = fuzzing.refusal(lambda: load_section("a", Numbers, path)) or ""
    assert line.startswith(f"{path}: ")
    assert reason in line


@pytest.mark.parametrize("section", PARAMS)
def test_wrong_value_of_any_key_is_refused_under_its_section(section: str) -> None:
    def keys_in(content: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key, value in content.items() if isinstance(content, dict) else ():
            yield (*above, key)
            yield from keys_in(value, (*above, key))

    def replaced(content: Any, keys: tuple[str, ...], value: Any) -> Any:
        return content | {keys[0]: replaced(content[keys[0]], keys[1:], value)} if keys else value

    for keys in keys_in(PARAMS[section], ()):
        if keys[0] == "own":  # its file checks it, once it is chosen
            continue
        for value in (float("nan"), float("inf"), {"a\nb": 1}):
            content = replaced(PARAMS[section], keys, value)
            assert refusal(content, section).startswith(f"{section}.{keys[0]}")


SPECIAL = "'\"\\${}[](),:=#&*!|>%@` \t\n1e3."
WORDS = [
    *("", "null", "True", "nan", "1e3", "0x10", "1_000", "-5", "2001-01-01"),
    *("/data/a, b", "choice(1,2)", "a${b}c", "\\${x}", "x\\"),
]
characters = st.characters(exclude_categories=["C"]) | st.sampled_from(SPECIAL)
texts = st.text(characters, max_size=10) | st.sampled_from(WORDS)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.none() | st.booleans() | numbers | texts.filter(lambda text: text != "???")  # OmegaConf's word for no value


@settings(max_examples=100)
@given(value=values | st.lists(values | st.lists(values, max_size=2), max_size=2))
def test_option_for_dvc_sets_the_value(value: Any) -> None:
    params = {"train": {"first": 1, "block": {"second": [2]}}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        YAML().dump(params, path)
        changes = {"train.block.second": value, "train.first": value}
        apply_overrides(path, as_overrides(changes))
        assert repr(read_yaml(path)) == repr(changed_params(params, changes))


def test_origin_of_a_wrong_value_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error advises what would lose an edit, such as `git checkout`."""
    (tmp_path / "params.yaml").write_text("section: {whole: 10, real: 1.0, flag: true, maybe: null}\n")
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]
    for arguments in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder in (tmp_path, copy):
        (folder / "params.yaml").write_text("section: {whole: ten, real: 1.0, flag: true, maybe: 2.0}\n")
    found = "params.yaml: section.whole: Input should be a valid integer, got 'ten'"
    monkeypatch.chdir(tmp_path)
    line = fuzzing.refusal(lambda: load_section("section", Numbers))
    assert line == f"{found}; the last commit has section.whole=10, section.maybe=null"
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    (tmp_path / "params.yaml").write_text("section: {whole: 10, real: 1.0, flag: true, maybe: 2.0}\n")
    monkeypatch.chdir(copy)
    line = fuzzing.refusal(lambda: load_section("section", Numbers))
    assert line == f"{found}; -S set section.whole=ten"


def test_missing_file_or_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)
    with pytest.raises(UserError, match=r"params\.yaml: no such file"):
        load_section("train", Numbers, path)
    path.write_text("first: {}\nsecond: {}\n")
    with pytest.raises(UserError, match="section 'train' is missing; found first, second"):
        load_section("train", Numbers, path)


FLAT_TRAIN = flatten({"train": TRAIN})
SHARED = {*SHARED_BLOCKS, "cross_entropy"}


def blocks(**changes: str | bool) -> set[str]:
    active = active_params(FLAT_TRAIN | {f"train.{key}": value for key, value in changes.items()})
    return {key.split(".")[1] for key in active if key.count(".") == 2}


def test_block_of_train_is_a_kind_or_in_force_by_itself_or_under_a_condition() -> None:
    hints = get_type_hints(TrainConfig).values()
    kinds = {cls.kind for hint in hints for cls in get_args(hint) or (hint,) if hasattr(cls, "kind")}
    names = {name for name, value in TRAIN.items() if isinstance(value, dict)}
    assert names - kinds == {*SHARED_BLOCKS, "loss_scaling", "privacy", "start"}


def test_blocks_of_chosen_types_are_active() -> None:
    assert blocks(model="mlp", optimizer="adamw", schedule="cosine") == {"mlp", "adamw", "cosine", *SHARED}
    assert blocks(model="cnn", optimizer="sgd", schedule="linear") == {"cnn", "sgd", "linear", *SHARED}
    assert blocks(model="linear", optimizer="sgd", schedule="cosine") == {"sgd", "cosine", *SHARED}
    assert blocks(precision="float16") == blocks() | {"loss_scaling"}
    assert blocks(**{"start.weights": "old.safetensors"}) == blocks() | {"start"}
    for enabled in (True, "True", "true"):
        assert blocks(**{"privacy.enabled": enabled}) == blocks() | {"privacy"}


@pytest.mark.parametrize(("key", "number"), [("vary", "members"), ("reduction", "shards")])
def test_params_of_several_members_or_shards_are_active_with_two(key: str, number: str) -> None:
    assert f"train.{key}" not in active_params(FLAT_TRAIN)
    assert f"train.{key}" not in active_params({name: str(value) for name, value in FLAT_TRAIN.items()})
    for value in (2, "2"):
        assert f"train.{key}" in active_params(FLAT_TRAIN | {f"train.{number}": value})


def test_params_outside_of_blocks_are_active() -> None:
    inactive = {"train.vary", "train.reduction"}
    assert {key for key in FLAT_TRAIN if key.count(".") == 1} - inactive <= active_params(FLAT_TRAIN).keys()
    without_model = {"train.cnn.dropout": 1, "evaluate.weights": "best"}
    assert active_params(without_model) == without_model


OWN_NETWORK = """
from typing import Annotated
from gradtrail.core.config import Bounds, Count, config

@config
class Network:
    width: Annotated[int, Bounds(at_least=1, at_most=64)]
    blocks: Count = 2
    def build(self, shape, num_classes, *, rngs):
        raise NotImplementedError
"""
BROKEN_BLOCKS = {
    "other key": ({"file": "mine", "wdith": 8}, "own.wdith is not a known key; did you mean 'width'?"),
    "bounds": ({"file": "mine", "width": 65}, "own.width must be at least 1 and at most 64, got 65"),
    "no file": ({"width": 8}, "own.file is missing"),
    "other file": (
        {"file": "yours", "width": 8},
        "own.file: pipeline/networks/yours.py: no such file; pipeline/networks has mine",
    ),
    "path": (
        {"file": "../mine", "width": 8},
        "own.file: must be the name of a file in pipeline/networks without .py, got '../mine'",
    ),
}


@pytest.fixture
def own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline/networks").mkdir(parents=True)
    (tmp_path / "pipeline/networks/mine.py").write_text(OWN_NETWORK)


def own_section(block: dict[str, Any]) -> dict[str, Any]:
    return {**TRAIN, "model": "own", "own": block}


@pytest.mark.usefixtures("own_network")
def test_block_of_a_file_is_read_and_written_back() -> None:
    config = validate(own_section({"file": "mine", "width": 8}), TrainConfig, "params.yaml: train")
    assert (config.model.name, config.model.config.width) == ("mine", 8)
    assert as_written(config)["own"] == {"file": "mine", "width": 8, "blocks": 2}
    assert validate({**as_written(config)}, TrainConfig, "again") == config


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("name", BROKEN_BLOCKS)
def test_block_of_a_file_is_refused_in_one_line(name: str) -> None:
    block, message = BROKEN_BLOCKS[name]
    assert refusal(own_section(block)) == f"train.{message}"
