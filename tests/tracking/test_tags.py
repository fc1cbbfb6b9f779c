"""The table of tags has every tag that the code sets, and the tag of a process says whether it still exists."""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from projects import ROOT

from gradtrail.tracking import tags as run_tags
from gradtrail.tracking.tags import CLONE, PROCESS, SHARED, clone_id, clone_tag, is_alive, is_of_this_host, process_tags

ROW = re.compile(r'^([A-Z_]+) = "(\S+)"  # \S.*; \S.*$', re.MULTILINE)  # constant, tag; what it says and who reads it
TABLE = dict(ROW.findall(Path(run_tags.__file__).read_text()))


def tags_set_by(source: str) -> Iterator[str]:
    """Yield the tags that code sets, or their constants if the table has none of that name; not those of variables."""
    for node in ast.walk(ast.parse(source)):
        keys: list[ast.expr | None] = []
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args) if args:
                keys += args[-2:-1] if name.endswith("set_tag") or re.fullmatch("set_.*_tag", name) else []
                keys += args[:1] if name.endswith("Tag") else []
                keys += keys_of(args[-1]) if re.fullmatch("set_(.*_)?tags", name) else []
            case ast.keyword(arg="tags", value=value):
                keys += keys_of(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="tags"), slice=key)]):
                keys.append(key)
            case (
                ast.Assign(targets=[target], value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                names = [name.id for name in ast.walk(target) if isinstance(name, ast.Name)]
                keys += keys_of(value) if any(name.endswith("tags") for name in names) else []
            case ast.FunctionDef(name=name) if re.fullmatch(r"\w+_tags?", name):
                keys += [key for part in ast.walk(node) if isinstance(part, ast.Return) for key in keys_of(part)]
        for key in keys:
            if isinstance(key, ast.Constant):
                yield str(key.value)
            elif isinstance(key, ast.Name) and key.id.isupper():
                yield TABLE.get(key.id, key.id)


def keys_of(node: ast.AST) -> list[ast.expr | None]:
    return [key for part in ast.walk(node) if isinstance(part, ast.Dict) for key in part.keys]


def test_every_tag_that_is_set_is_in_the_table() -> None:
    modules = {path: {*tags_set_by(path.read_text())} for path in (ROOT / "src").rglob("*.py")}
    assert {path: unknown for path, tags in modules.items() if (unknown := tags - {*TABLE.values()})} == {}
    from_variables = {TABLE["MOVE"]}
    assert {*TABLE.values()} - set().union(*modules.values()) == from_variables, "no code sets them"


def test_a_tag_is_found_however_it_is_set() -> None:
    source = """
client.set_tag(run_id, "a", "1")
client.set_model_version_tag(name, version, "b", reason)
client.log_batch(run_id, tags=[RunTag(C, words)])
stored.set_tags({NOTE: words} | {"d": words})
client.create_run(experiment, tags={STAGE: stage, "e": ""})
source, tags = model, {"f": ""}
tags |= {"j": ""}
made_tags: dict[str, str] = {"g": ""}
tags["h"] = ""
def made_tags():
    return {"i": ""} if state else {}
"""
    assert {*tags_set_by(source)} - {*TABLE.values()} == {*"abCdefghij"}


def test_process_is_alive_until_it_ends() -> None:
    assert is_of_this_host(process_tags())
    assert is_alive(process_tags())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    for other in (f"{socket.gethostname()}:{process.pid}:1", f"{socket.gethostname()}:{os.getpid()}:1"):
        assert not is_alive({PROCESS: other}), "it ended, or another process has its number"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell when a process started by ticks")
def test_a_clock_that_is_set_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux derives when a process started from the clock and the time since the boot."""
    before, boot = process_tags(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600)
    assert is_alive(before)


@pytest.mark.parametrize("tags", [{}, {PROCESS: f"elsewhere:{os.getpid()}:1"}])
def test_processes_of_other_hosts_are_not_alive(tags: dict[str, str]) -> None:
    assert not is_of_this_host(tags)
    assert not is_alive(tags)


def test_a_copy_of_a_clone_is_another_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first := tmp_path / "first").mkdir()
    monkeypatch.setenv("DVC_ROOT", str(first))
    own = clone_id()
    assert clone_id() == own
    assert clone_tag({}) == clone_tag({"stage": "train", CLONE: own}) == {CLONE: own}
    shutil.copytree(first, copy := tmp_path / "copy")
    first.rename(moved := tmp_path / "moved")
    monkeypatch.setenv("DVC_ROOT", str(moved))
    assert clone_id() == own
    monkeypatch.setenv("DVC_ROOT", str(copy))
    assert clone_id() != own
    assert clone_tag({CLONE: own}) == clone_tag({"stage": "train"}) == {CLONE: SHARED}
