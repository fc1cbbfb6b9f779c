"""Resolves a model URI: a folder, or a version in MLflow's registry, which is downloaded once and verified.

Out of scope: changing the registry, see `serving/release`. MLflow is imported late, so that a folder needs none of it.
"""

import contextlib
import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import flatten
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.model.exported import MANIFEST, Manifest, export_name, read_manifest, verified_bytes
from gradtrail.support.errors import UserError, is_store_fault, one_line
from gradtrail.support.paths import store_uri
from gradtrail.tracking.stale_outs import warn_of_earlier_model

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"  # aliases
MODELS = "models:/"
_CACHE = Path(".gradtrail/exports")  # downloaded exports, each in a folder named by its digest
_EXPORTED = "data/export"  # folder of a logged model
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for a missing version or alias
_FORMS = "models:/NAME@ALIAS, models:/NAME/VERSION, models:/MODEL_ID"
_MODEL_ID, _DIGEST = re.compile("m-[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")
T = TypeVar("T")


class RegistryUnavailable(UserError):  # noqa: N818 - not a mistake of the user
    """MLflow's store did not respond."""


class _NotInStore(UserError):  # noqa: N818
    """The store has no such model, version or alias."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An exported model on this machine, or, before it is downloaded, as the registry describes it."""

    name: str
    version: str | None  # version in the registry; None for a folder and for a model that is not registered
    run_id: str | None  # run of its training; None for a folder
    digest: str  # digest of the manifest
    folder: Path  # folder with the export
    model_id: str | None = None  # logged model; None for a folder


def resolve(model: str, cache: Path = _CACHE) -> Reference:
    """Return the export of a folder or of a URI in MLflow, every file verified; download it unless it is in the cache.

    If the store is unavailable, the last resolution of the URI is used, with a warning.

    Raises:
        RegistryUnavailable: The store is unavailable, and the URI was never resolved here.
        UserError: There is no such model or folder, the model is no export, or the download is damaged.
    """
    if not model.startswith(MODELS):
        return _resolve_folder(Path(model))
    record = _record_path(cache, model)
    try:
        reference = _ask(lambda client: _find(client, model, cache))
    except RegistryUnavailable as error:
        if not record.is_file():
            raise
        content = json.loads(record.read_text(encoding="utf-8"))
        reference = Reference(**content, folder=cache / content["digest"])
        if not _is_intact(reference.folder):
            raise
        print(f"warning: {error}; using the last known export of {model}, {reference.digest[:12]}", file=sys.stderr)
        return reference
    if not _is_intact(reference.folder):
        _ask(lambda client: _download(client, reference))
    write_json(record, {key: value for key, value in asdict(reference).items() if key != "folder"})
    return reference


def remember(alias: str, version: str, cache: Path = _CACHE) -> None:
    """Record that `models:/NAME@ALIAS` refers to `models:/NAME/VERSION`, for when the store is unavailable."""
    if (resolved := _record_path(cache, version)).is_file():
        write_json(_record_path(cache, alias), json.loads(resolved.read_text(encoding="utf-8")))


def version_of(name: str, alias: str) -> str | None:
    """Return the version of an alias, by one request; None if there is no such model or alias.

    Raises:
        RegistryUnavailable: The store is unavailable.
    """
    try:
        return str(_ask(lambda client: client.get_model_version_by_alias(name, alias)).version)
    except _NotInStore:
        return None


def registered_name(params: Path = Path("params.yaml")) -> str:
    """Return the name of the model in the registry: `export.name` of `params.yaml`, or that of the data set."""
    values = flatten(read_yaml(params))
    if "export.name" not in values:
        raise UserError(f"{params}: export.name is missing; it names the model in MLflow's registry")
    return export_name(values["export.name"], values.get("fetch.dataset", ""))


def verify_export(folder: Path) -> Manifest:
    """Return the manifest of an export, after comparing every file with its digest; UserError if one is damaged."""
    manifest = read_manifest(folder)
    for name in manifest.files:
        verified_bytes(folder, name, manifest)
    return manifest


def _resolve_folder(path: Path) -> Reference:
    folder = next((folder for folder in (path, path / _EXPORTED) if (folder / MANIFEST).is_file()), None)
    if folder is None:
        raise UserError(f"{path}: no exported model here (no {MANIFEST}); a model is {_FORMS}, or a folder")
    manifest = verify_export(folder)
    if folder.resolve().match("models/export"):
        warn_of_earlier_model(folder.resolve().parents[1], ["export"])
    return Reference(name=manifest.name, version=None, run_id=None, digest=manifest.digest, folder=folder)


def _find(client: "MlflowClient", model: str, cache: Path) -> Reference:
    """Return what the registry has for a URI; raise UserError if it has no export."""
    from gradtrail.tracking.tags import EXPORT_DIGEST

    # The version, if the URI has one, and its logged model.
    version, model_id = None, model.removeprefix(MODELS)
    if not _MODEL_ID.fullmatch(model_id):
        version = _find_version(client, model)
        model_id = version.model_id or str(version.source).removeprefix(MODELS)
    logged = client.get_logged_model(model_id)

    digest = logged.tags.get(EXPORT_DIGEST)
    if digest is None:
        raise UserError(f"{model}: has no export; `dvc repro export` makes one")
    if not _DIGEST.fullmatch(digest):  # people can edit the tag, and it becomes the name of a folder
        raise UserError(f"{model}: the tag {EXPORT_DIGEST} of {model_id} is no SHA-256: {digest[:80]!r}")
    return Reference(
        name=version.name if version else logged.name,
        version=str(version.version) if version else None,
        run_id=logged.source_run_id,
        digest=digest,
        folder=cache / digest,
        model_id=model_id,
    )


def _find_version(client: "MlflowClient", model: str) -> "ModelVersion":
    parts = re.fullmatch(f"{MODELS}(.+)(?:@(.+)|/([0-9]+))", model)
    if parts is None:
        raise UserError(f"{model}: must be {_FORMS}")
    name, alias, number = parts.groups()
    return client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)


def _download(client: "MlflowClient", reference: Reference) -> None:
    """Download an export into a temporary folder, verify it, and rename it."""
    import mlflow

    folder = reference.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        uri = f"{client.get_logged_model(reference.model_id).artifact_location}/{_EXPORTED}"
        try:
            new = Path(mlflow.artifacts.download_artifacts(uri, dst_path=temporary, tracking_uri=client.tracking_uri))
            if verify_export(new).digest != reference.digest:
                raise UserError(f"its manifest is not the one with the digest {reference.digest[:12]}…")
        except Exception as error:
            if not (isinstance(error, UserError) or is_store_fault(error)):
                raise
            raise UserError(f"{uri}: the download failed or is damaged: {one_line(error)[-200:]}") from None
        if folder.exists() and not _is_intact(folder):
            folder.rename(Path(temporary) / "damaged")
        with contextlib.suppress(OSError):  # another process was first
            new.rename(folder)


def _is_intact(folder: Path) -> bool:
    """Whether an export is in the cache, undamaged."""
    with contextlib.suppress(UserError):
        return verify_export(folder).digest == folder.name
    return False


def _record_path(cache: Path, model: str) -> Path:
    """Return the file with the last resolution of a URI."""
    return cache / "last" / f"{quote(f'{store_uri()} {model}', safe='')[-200:]}.json"


def _ask(question: "Callable[[MlflowClient], T]") -> T:
    """Return the answer of the store; raise RegistryUnavailable if it does not respond."""
    try:
        return question(_client(store_uri()))
    except UserError:
        raise
    except Exception as error:
        if getattr(error, "error_code", None) in _MISSING:
            message = f"not in MLflow's store: {one_line(error)[:200]}; `gradtrail promote` registers a model"
            raise _NotInStore(message) from None
        if not is_store_fault(error):
            raise
        raise RegistryUnavailable(f"MLflow's registry does not respond: {one_line(error)[:200]}") from None


@functools.cache  # opening a store is slow, and a server asks every few seconds
def _client(uri: str) -> Any:  # noqa: ARG001 - the key of the cache
    from gradtrail.tracking.store import open_store

    return open_store()
