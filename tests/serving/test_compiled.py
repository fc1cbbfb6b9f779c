"""`gradtrail export --compiled` and `gradtrail serve --compiled`: nothing is compiled where the kind and digest fit."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exports import write_small_export
from factories import ROOT
from server_process import command, environment, server

from gradtrail.serving.compiled import export_compiled, use_compiled
from gradtrail.stages.common.files import write_json
from gradtrail.stages.model.exported import MANIFEST, read_export, read_manifest
from gradtrail.support.errors import UserError

EXPORT = "from pathlib import Path; from gradtrail.serving.compiled import *; export_compiled(Path('{}'), Path('{}'))"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with programs, by a process of its own, whose cache this one does not share."""
    folder = tmp_path_factory.mktemp("compiled")
    write_small_export(folder / "export", precisions=("bfloat16",))
    (folder / "compiled").mkdir()
    code = EXPORT.format(folder / "export", folder / "compiled")
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), check=True)
    return folder / "compiled"


def cache_of(folder: Path, kind: str) -> Path:
    (folder / kind).mkdir()
    return folder / kind


def kind_of(folder: Path) -> str:
    (kind,) = (path.name for path in (folder / "compiled").iterdir())
    return kind


def test_programs_of_this_kind_alone_go_into_the_cache_if_the_digest_is_the_trusted_one(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, digest = kind_of(compiled), read_manifest(compiled).digest
    own, other = cache_of(tmp_path, kind), cache_of(tmp_path, "jaxlib-0.0.1-another")
    with pytest.raises(UserError, match=f"--compiled 123: the digest of {compiled / MANIFEST} is {digest}"):
        use_compiled(compiled, "123", own)
    assert [*own.iterdir()] == []
    use_compiled(compiled, digest, other)
    assert [*other.iterdir()] == []
    assert f"has no compiled programs for {other.name}" in capsys.readouterr().err
    use_compiled(compiled, digest, own)
    entries = {path.name: path.read_bytes() for path in (compiled / "compiled" / kind).iterdir()}
    assert {path.name: path.read_bytes() for path in own.iterdir()} == entries
    assert len(entries) == 2 * len(read_manifest(compiled).batch_sizes), "in both precisions"
    assert not any(content.startswith(b"\x80") for content in entries.values()), "no pickle"


def test_damaged_program_and_another_model_are_refused(compiled: Path, tmp_path: Path) -> None:
    source = write_small_export(tmp_path / "export", seed=1)
    with pytest.raises(UserError, match="has another model than"):
        export_compiled(source, compiled)
    for folder, message in ((source, "must be outside of"), (source / "in", "must be"), (tmp_path, "has files but no")):
        with pytest.raises(UserError, match=f"--compiled {folder}: {message}"):
            export_compiled(source, folder)
    copy, manifest = tmp_path / "copy", read_manifest(compiled)
    for name in manifest.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((compiled / name).read_bytes() + b"x" * name.startswith("compiled/"))
    write_json(copy / MANIFEST, json.loads((compiled / MANIFEST).read_text()))
    cache = cache_of(tmp_path, kind_of(compiled))
    with pytest.raises(UserError, match=r"-cache: damaged: its SHA-256 is not that of manifest\.json"):
        use_compiled(copy, manifest.digest, cache)
    assert [*cache.iterdir()] == []


@pytest.mark.slow
def test_programs_of_other_kinds_are_kept(compiled: Path, tmp_path: Path) -> None:
    source, folder, manifest = compiled.parent / "export", tmp_path / "both", read_manifest(compiled)
    theirs = {
        name.replace("jaxlib-", "jaxlib-9"): digest for name, digest in manifest.files.items() if "jaxlib-" in name
    }
    for name in manifest.files:
        path = folder / name.replace("jaxlib-", "jaxlib-9")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((compiled / name).read_bytes())
    files = theirs | {name: digest for name, digest in manifest.files.items() if "jaxlib-" not in name}
    write_json(folder / MANIFEST, dataclasses.asdict(dataclasses.replace(manifest, files=files)))
    subprocess.run([sys.executable, "-c", EXPORT.format(source, folder)], cwd=tmp_path, env=environment(), check=True)
    assert read_manifest(folder).files.keys() == manifest.files.keys() | theirs.keys()
    assert read_export(folder).manifest == read_manifest(folder)


@pytest.mark.slow
def test_server_with_compiled_programs_compiles_nothing(compiled: Path, tmp_path: Path) -> None:
    sizes = read_manifest(compiled).batch_sizes
    for name, options in (("miss", ()), ("hit", ("--compiled", read_manifest(compiled).digest))):
        place = tmp_path / name
        place.mkdir()
        with server(compiled, *options, DVC_ROOT=str(place)) as running:
            series = [f'gradtrail_compile_seconds_count{{cache="{name}",size="{size}"}}' for size in sizes]
            running.wait(lambda: running.metric(series[-1]) == 1)  # noqa: B023
            assert [running.metric(one) for one in series] == [1] * len(sizes)
            assert running.end(signal.SIGTERM) == 0
    ran = subprocess.run(
        command(str(compiled), "--compiled", "123", "--port", "0"),
        check=False,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
