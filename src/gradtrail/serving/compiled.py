"""Compiled programs that travel with an export, so that a server on the same kind of processor compiles nothing.

They are entries of JAX's compile cache: machine code without a pickle, which JAX looks up by a key of the program, its
version, flags and device, so that it never uses one that does not fit. The manifest has their digests, and a server
runs them only if it was given the digest of the manifest.

Out of scope: MLflow's registry, as an export of `models/export` has the same bytes on every machine.
"""

import dataclasses
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from gradtrail.core.nn.arithmetic import Precision
from gradtrail.serving.registry import verify_export
from gradtrail.stages.common.files import atomic_file, write_json
from gradtrail.stages.common.setup import set_up_cache
from gradtrail.stages.model.exported import (
    MANIFEST,
    PLATFORMS,
    program_name,
    read_export,
    read_manifest,
    verified_bytes,
)
from gradtrail.support.errors import UserError

_FOLDER = "compiled"  # in an export: a folder for each version of jaxlib and kind of processor


def export_compiled(source: Path, folder: Path) -> int:
    """Copy an export to a folder, with programs for this kind of processor; keep those of other kinds there.

    Raises:
        UserError: A file is damaged, or the folder has another model or other files, or is in the source; one line.
    """
    if folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--compiled {folder}: must be outside of {source}")
    manifest, is_new = verify_export(source), not folder.exists() or not any(folder.iterdir())
    if not is_new and not (folder / MANIFEST).exists():
        raise UserError(f"--compiled {folder}: has files but no {MANIFEST}; name a new or empty folder")
    files = {} if is_new else dict(verify_export(folder).files)
    others = {name: digest for name, digest in files.items() if name.startswith(f"{_FOLDER}/")}
    if files and dataclasses.replace(manifest, files={**manifest.files, **others}) != read_manifest(folder):
        raise UserError(f"{folder}: has another model than {source}; name a new folder")
    kind = set_up_cache().name
    with tempfile.TemporaryDirectory() as cache:
        _leave_paths_out_of_keys()
        jax.config.update("jax_compilation_cache_dir", cache)
        reset_cache()  # else JAX keeps the folder that it used first
        for precision in ("", *get_args(Precision)):
            if not precision or program_name(PLATFORMS[jax.default_backend()], precision) in manifest.files:
                model = read_export(source, precision)
                for size in manifest.batch_sizes:
                    model.compile(size)
        entries = {f"{_FOLDER}/{kind}/{path.name}": path.read_bytes() for path in Path(cache).glob("*-cache")}
    shutil.copytree(source, folder, dirs_exist_ok=True)
    for name, content in entries.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in entries.items()}
    manifest = dataclasses.replace(manifest, files={**manifest.files, **others, **digests})
    write_json(folder / MANIFEST, dataclasses.asdict(manifest))
    print(
        f"{folder}: {len(entries)} programs for {kind}; gradtrail serve --model {folder} --compiled {manifest.digest}"
    )
    return 0


def use_compiled(folder: Path, trusted: str, cache: Path) -> None:
    """Put the programs of an export for this kind of processor into JAX's cache; warn if there are none.

    Raises:
        UserError: The digest of the manifest is not the trusted one, or a program is damaged; one line.
    """
    manifest = read_manifest(folder)
    if manifest.digest != trusted:
        raise UserError(f"--compiled {trusted[:80]}: the digest of {folder / MANIFEST} is {manifest.digest}")
    _leave_paths_out_of_keys()
    names = [name for name in manifest.files if name.startswith(f"{_FOLDER}/{cache.name}/")]
    for name in names:
        content = verified_bytes(folder, name, manifest)
        with atomic_file(cache / Path(name).name) as temporary:
            temporary.write_bytes(content)
    if not names:
        print(f"warning: {folder} has no compiled programs for {cache.name}; they are compiled now", file=sys.stderr)


def _leave_paths_out_of_keys() -> None:
    """Keep JAX from adding the folder of the cache to its keys, as the one of XLA's own cache for GPUs."""
    config: Any = jax.config  # whose switches mypy does not know
    config.update("jax_persistent_cache_enable_xla_caches", "none")
