"""Text that is no pipeline and no lock: one line that names the file, and the key where there is one.

Each search tries the same few inputs in every run, and as a slow test many random ones. A failure prints the input, to
be added as an example.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from hypothesis import strategies as st
from ruamel.yaml import YAML
from untrusted import NASTY, VALUES, damaged, keys_of, refusal, replaced, search

from gradtrail.stages.common.pipeline_file import Entry, live_entry, locked_entry, read_lock, read_pipeline
from gradtrail.tracking.lineage.keys import state_key

both_searches = pytest.mark.parametrize("is_random", cases([False, True], fast=[False]), ids=["fixed", "random"])


def states(folder: Path) -> None:
    """Read everything that decides the states of the stages in a folder."""
    pipeline = read_pipeline(folder / "dvc.yaml")
    lock = read_lock(folder / "dvc.lock")
    entries: dict[str, Entry] = {name: locked_entry(stage) for name, stage in lock.items() if name in pipeline}
    for name, spec in pipeline.items():
        entries.setdefault(name, live_entry(dataclasses.replace(spec, deps=()), folder))
    for name in pipeline:
        state_key(name, entries[name])


GOOD = {
    "dvc.yaml": (
        b"stages:\n  make:\n    cmd: make it\n    deps: [code.py]\n    params:\n      - make\n"
        b"      - pipeline/versions.yaml:\n"
        b"          - numpy\n    outs: [data]\n    metrics:\n"
        b"      - results/metrics/make.json:\n          cache: false\n"
        b"  use:\n    cmd: use it\n    deps: [data/part.txt]\n    params: [use.rate]\n    outs:\n      - results\n"
    ),
    "dvc.lock": (
        b"schema: '2.0'\nstages:\n  make:\n    cmd: make it\n    deps:\n    - path: code.py\n      hash: md5\n"
        b"      md5: 01ab\n      size: 1\n    params:\n      params.yaml:\n        make:\n          size: 3\n"
        b"    outs:\n    - path: data\n      hash: md5\n      md5: 4567.dir\n"
    ),
    "params.yaml": b"make: {size: 3}\nuse: {rate: 1e-3}\n",
    "pipeline/versions.yaml": b'numpy: "2.0"\n',
}


def write_good(folder: Path, **changed: bytes) -> None:
    for name, data in (GOOD | {key.replace("_", "."): data for key, data in changed.items()}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def test_a_good_pipeline_has_states(tmp_path: Path) -> None:
    write_good(tmp_path)
    assert refusal(lambda: states(tmp_path)) is None


@both_searches
def test_damaged_files_of_the_pipeline_are_read_or_refused(tmp_path: Path, *, is_random: bool) -> None:
    def check(drawn: tuple[str, bytes]) -> None:
        name, data = drawn
        write_good(tmp_path)
        (tmp_path / name).write_bytes(data)
        line = refusal(lambda: states(tmp_path))
        assert line is None or line.startswith(str(tmp_path))

    files = st.sampled_from(sorted(GOOD)).flatmap(lambda name: st.tuples(st.just(name), damaged(GOOD[name])))
    search(check, files, 15, is_random=is_random)


@both_searches
def test_any_value_in_the_place_of_another_is_read_or_refused(tmp_path: Path, *, is_random: bool) -> None:
    yaml = YAML(typ="safe", pure=True)
    contents = {name: yaml.load(GOOD[name]) for name in ("dvc.yaml", "dvc.lock")}

    def check(drawn: tuple[str, tuple[str, ...], Any]) -> None:
        name, keys, value = drawn
        write_good(tmp_path)
        with (tmp_path / name).open("w") as stream:
            yaml.dump(replaced(contents[name], keys, value), stream)
        line = refusal(lambda: states(tmp_path))
        assert line is None or line.startswith(str(tmp_path))

    places = st.sampled_from([(name, keys) for name, content in contents.items() for keys in keys_of(content)])
    values = (VALUES | st.sampled_from(NASTY)).filter(lambda value: not isinstance(value, int) or abs(value) < 10**300)
    search(check, st.tuples(places, values).map(lambda drawn: (*drawn[0], drawn[1])), 15, is_random=is_random)


STRUCTURES = {
    "no stages": b"plots: []\n",
    "stages that are a list": b"stages: [make]\n",
    "stages that are nothing": b"stages:\n",
    "a stage that is text": b"stages: {make: it}\n",
    "a stage without a command": b"stages: {make: {deps: [a]}}\n",
    "deps that are text": b"stages: {make: {cmd: it, deps: code.py}}\n",
    "deps that are numbers": b"stages: {make: {cmd: it, deps: [1]}}\n",
    "params that are text": b"stages: {make: {cmd: it, params: make}}\n",
    "params of a file that are text": b"stages: {make: {cmd: it, params: [{pipeline/versions.yaml: numpy}]}}\n",
    "an out that is a list": b"stages: {make: {cmd: it, outs: [[data]]}}\n",
    "params of two lines": b'stages: {make: {cmd: it, params: ["new\\nline"]}}\n',
    "params that are not there": b"stages: {make: {cmd: it, params: [make.width]}}\n",
    "params below a number": b"stages: {make: {cmd: it, params: [make.size.width]}}\n",
    "params of no file": b"stages: {make: {cmd: it, params: [{other.yaml: [numpy]}]}}\n",
    "stages in a circle": b"stages: {a: {cmd: it, deps: [b], outs: [a]}, b: {cmd: it, deps: [a], outs: [b]}}\n",
    "a stage of its own": b"stages: {a: {cmd: it, deps: [a/b], outs: [a]}}\n",
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_pipeline_of_another_structure_is_refused(tmp_path: Path, name: str) -> None:
    write_good(tmp_path, dvc_yaml=STRUCTURES[name], dvc_lock=b"schema: '2.0'\n")
    assert refusal(lambda: states(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"stages: [make]\n",
        b"stages: {make: it}\n",
        b"stages: {make: {}}\n",
        b"stages: {make: {cmd: it, deps: [code.py]}}\n",
        b"stages: {make: {cmd: it, deps: [{path: code.py}]}}\n",
        b"stages: {make: {cmd: it, deps: [{path: code.py, md5: 12}]}}\n",
        b"stages: {make: {cmd: it, params: [make]}}\n",
        b"stages: {make: {cmd: it, outs: [{md5: a}]}}\n",
    ],
)
def test_a_lock_of_another_structure_is_refused_by_its_key(tmp_path: Path, content: bytes) -> None:
    write_good(tmp_path, dvc_lock=content)
    assert (refusal(lambda: states(tmp_path)) or "").startswith(f"{tmp_path / 'dvc.lock'}.stages")
