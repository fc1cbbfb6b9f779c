"""Text that is no params: one line that names the file, and the key where there is one.

Each search tries the same few inputs in every run, and as a slow test many random ones. A failure prints the input, to
be added as an example.
"""

import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from factories import ROOT
from hypothesis import strategies as st
from untrusted import (
    MAX_BYTES,
    NUMBERS,
    VALUES,
    damaged,
    keys_of,
    on_linux,
    refusal,
    replaced,
    search,
    taken_bytes,
)

from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.experiments.sections import section_configs
from gradtrail.stages.common.params import load_section, read_yaml, validate
from gradtrail.stages.common.stage import Stage, run_stage

TEXT = (ROOT / "params.yaml").read_text()
PARAMS = read_yaml(ROOT / "params.yaml")
SECTIONS = section_configs(ROOT)

both_searches = pytest.mark.parametrize("is_random", cases([False, True], fast=[False]), ids=["fixed", "random"])


def load_evaluate(path: Path) -> EvaluateConfig:
    return load_section("evaluate", EvaluateConfig, path)


def load_refused(path: Path) -> None:
    line = refusal(lambda: load_evaluate(path))
    assert line is not None
    assert line.startswith(f"{path}: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "params.yaml"


# Params.

TOKENS = [
    *"[]{}:,-?!&*|>'\"%@`#\n \t0123456789abcxeE.~=<",
    *(
        "!!int ",
        "!!float ",
        "!!bool ",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!pairs ",
        "!!null ",
        "!!str ",
    ),
    *("!!map ", "!!seq ", "!<tag:yaml.org,2002:int> ", "!!python/object:os.system ", "!!python/name:os.system "),
    *("&a ", "*a ", "<<: ", "? ", "- ", ": ", "---\n", "...\n", "%YAML 1.1\n---\n", "%TAG ! x\n---\n"),
    *("2001-99-99", "2001-01-01", "0x", "0b12", "1_0", "1:60", ".inf", ".nan", "1e400", "9" * 5000, "0x" + "f" * 5000),
    *('"\\ud800"', '"\\x0a"', '"\\0"', "\u2028", "\ufeff", "é", "\U0001f600", "\x07", "x" * 2000),
]


@both_searches
def test_tokens_of_yaml_in_any_order_are_refused(path: Path, *, is_random: bool) -> None:
    def check(tokens: list[str]) -> None:
        path.write_text("".join(tokens), encoding="utf-8")
        load_refused(path)

    starts = st.sampled_from(["evaluate: ", "evaluate:\n  batch_size: ", "evaluate: &a ", ""])
    tokens = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=10)
    search(check, st.tuples(starts, tokens).map(lambda drawn: [drawn[0], *drawn[1]]), 60, is_random=is_random)


@both_searches
def test_any_bytes_are_refused(path: Path, *, is_random: bool) -> None:
    def check(data: bytes) -> None:
        path.write_bytes(data)
        load_refused(path)

    search(check, st.binary(max_size=60), 20, is_random=is_random)


SHORT = TEXT[TEXT.index("\nevaluate:") + 1 : TEXT.index("\ngradients:") + 1]


@both_searches
def test_damaged_params_are_read_or_refused(path: Path, *, is_random: bool) -> None:
    def check(data: bytes) -> None:
        path.write_bytes(data)
        refusal(lambda: load_evaluate(path))

    search(check, damaged(SHORT.encode()), 20, is_random=is_random)


def refusal_of(keys: tuple[str, ...], value: Any) -> str | None:
    """Return the line with which a section is refused that has a value in the place of another."""
    content = replaced(PARAMS[keys[0]], keys[1:], value)
    return refusal(lambda: validate(content, SECTIONS[keys[0]], f"params.yaml: {keys[0]}"))


@pytest.mark.parametrize("section", PARAMS)
def test_any_value_of_any_key_is_read_or_refused_under_its_section(section: str) -> None:
    for keys in ((section,), *((section, *keys) for keys in keys_of(PARAMS[section]))):
        for value in (*NUMBERS[:3], 10**400, "text", ["new\nline"], {"a\nb": 1}):
            line = refusal_of(keys, value)
            assert line is None or line.startswith(f"params.yaml: {section}")
            if isinstance(value, float) and not math.isfinite(value):
                assert line is not None
                assert line.startswith(f"params.yaml: {'.'.join(keys)}")


def test_a_number_that_nothing_can_count_is_refused_by_its_key() -> None:
    def numbers(keys: tuple[str, ...], content: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        match content:
            case dict():
                for key, value in content.items():
                    yield from numbers((*keys, key), value)
            case list() if all(isinstance(each, int | float) for each in content):
                yield keys, [*content, 99999999999999999999]
            case None:
                yield keys, 99999999999999999999
            case int() | float() if not isinstance(content, bool):
                yield from ((keys, value) for value in (99999999999999999999, 2**31, 2.0**31))

    found = [*numbers((), {name: section for name, section in PARAMS.items() if name in SECTIONS})]
    assert len(found) > 100
    taken = {".".join(keys): value for keys, value in found if refusal_of(keys, value) is None}
    seeds = dict.fromkeys(("preprocess.seed", "train.seed", "audit.seed", "privacy_audit.seed"), 2**31)
    assert taken == {**seeds, "train.loss_scaling.initial": 2**31}, "up to 2**32 and 2**127"
    for keys, value in found:
        if (line := refusal_of(keys, value)) is not None:
            assert re.match(rf"params\.yaml: {'.'.join(keys)}\b", line)


@pytest.mark.slow
def test_random_values_of_any_key_are_read_or_refused_under_its_section() -> None:
    def check(drawn: tuple[tuple[str, ...], Any]) -> None:
        line = refusal_of(*drawn)
        assert line is None or line.startswith(f"params.yaml: {drawn[0][0]}")

    search(check, st.tuples(st.sampled_from(keys_of(PARAMS)), VALUES), 100, is_random=True)


def laughs(levels: int, each: int = 10) -> str:
    """Return YAML of a few lines that stands for `each ** levels` words."""
    lines = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * each)}]\n" for level in range(1, levels)]
    return "a0: &a0 [" + ", ".join(["lol"] * each) + "]\n" + "".join(lines) + f"evaluate: *a{levels - 1}\n"


HOSTILE = {
    "billion laughs": laughs(9),
    "a long text many times": f"a: &a {'x' * 100_000}\nevaluate: [{', '.join(['*a'] * 1000)}]\n",
    "merged many times": "a: &a {"
    + ", ".join(f"k{number}: 1" for number in range(2000))
    + "}\nevaluate: {<<: ["
    + ", ".join(["*a"] * 20_000)
    + "]}\n",
    "merged into itself": "evaluate: &a {<<: *a}\n",
    "itself": "evaluate: &a [*a]\n",
    "itself below": "evaluate: &a {batch_size: {b: *a}}\n",
    "deep lists": "evaluate: " + "[" * 50_000,
    "deep brackets": "evaluate: " + "[{a: " * 20_000,
    "deep lists, closed": "evaluate: " + "[" * 300 + "]" * 300,
    "deep mappings": "evaluate: " + "{a: " * 300 + "1" + "}" * 300,
    "deep lists, many": "evaluate: [" + ("[" * 98 + "]" * 98 + ",") * 1300 + "]\n",
    "deep lists after as many that end": "# " + "]" * 20_000 + "\nevaluate: " + "[" * 20_000,
    "deep lists of blocks": "evaluate:\n " + "- " * 100_000 + "\n",
    "deep keys of blocks": "? " * 100_000 + "\n",
    "many numbers": "evaluate: [" + "1," * 120_000 + "]\n",
    "deep blocks": "".join(" " * depth + "evaluate:\n" for depth in range(1000)),
    "a list as a key": "evaluate: {[a, b]: 1}\n",
    "a list in a list as a key": "evaluate: {[a, [b]]: 1}\n",
    "a mapping as a key": "evaluate: {{a: 1}: 1}\n",
    "a date as a key": "evaluate: {2001-01-01: 1}\n",
    "a key of two lines": 'evaluate: {"a\\nb": 1}\n',
    "a section of two lines": '"a\\nb": 1\n"c\\u2028d": 1\n',
    "a long value": "evaluate: " + "x" * 100_000 + "\n",
    "a long key": "evaluate: {" + "x" * 100_000 + ": 1}\n",
    "a long number": "evaluate: {batch_size: " + "9" * 4000 + "}\n",
    "a longer number": "evaluate: {batch_size: 0x" + "f" * 5000 + "}\n",
    "a key twice": "evaluate: 1\nevaluate: 2\n",
    "two documents": "evaluate: 1\n---\nevaluate: 2\n",
    "an object": "evaluate: !!python/object/apply:os.system [exit]\n",
    "too long": "a: 1\n" * 300_000,
}


@on_linux
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_and_takes_no_memory(path: Path, name: str) -> None:
    path.write_text(HOSTILE[name])
    started = time.process_time()
    assert taken_bytes(lambda: load_refused(path)) < MAX_BYTES
    assert time.process_time() - started < 15, "it takes one second; the bound is for slow machines"


def test_nesting_and_size_are_refused_beyond_their_limits_and_not_before(path: Path) -> None:
    def depth(count: int) -> str:
        return "evaluate: " + "[" * (count - 1) + "]" * (count - 1)

    def size(count: int) -> str:
        return "evaluate: [" + "1," * (count - 3) + "]"

    for text, limit, reason in ((depth, 50, "nested more than 50 deep"), (size, 10_000, "more than 10,000 keys and")):
        path.write_text(text(limit))
        assert list(read_yaml(path)) == ["evaluate"]
        path.write_text(text(limit + 1))
        assert reason in (refusal(lambda: read_yaml(path)) or "")


def test_brackets_in_texts_and_comments_nest_nothing(path: Path) -> None:
    brackets = "[{" * 10_000
    path.write_text(f"# {brackets}\ndouble: \"{brackets}\"\nsingle: '{brackets}'\nplain: x{brackets}  # {brackets}\n")
    assert read_yaml(path) == {"double": brackets, "single": brackets, "plain": f"x{brackets}"}


def test_an_anchor_that_is_set_twice_is_no_fault(path: Path) -> None:
    path.write_text("first: &size 400\nsecond: &size 500\n" + SHORT.replace("batch_size: 1000", "batch_size: *size"))
    assert load_evaluate(path).batch_size == 500


def test_aliases_that_stand_for_little_are_read(path: Path) -> None:
    path.write_text("size: &size 500\n" + SHORT.replace("batch_size: 1000", "batch_size: *size"))
    assert load_evaluate(path).batch_size == 500


def test_dates_are_text_and_what_only_a_tag_makes_is_refused(path: Path) -> None:
    path.write_text("report:\n  title: 2001-02-03\n  other: 2001-02-03T04:05:06Z\n")
    assert read_yaml(path) == {"report": {"title": "2001-02-03", "other": "2001-02-03T04:05:06Z"}}
    for value in ("!!binary aGk=", "!!set {a, b}"):
        path.write_text(f"report: {{title: {value}}}\n")
        assert "not JSON serializable" in (refusal(lambda: read_yaml(path)) or "")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in (refusal(lambda: read_yaml(tmp_path)) or "")


def test_a_stage_ends_with_one_line_and_exit_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pipeline").mkdir()
    for name in ("dvc.yaml", "pipeline/versions.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "params.yaml").write_text(laughs(9))
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)

    def main(stage: Stage) -> None:
        stage.params(EvaluateConfig)

    with pytest.raises(SystemExit) as ended:
        run_stage(main, "evaluate")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluate: params.yaml: ")
