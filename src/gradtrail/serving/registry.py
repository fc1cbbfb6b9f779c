"""Resolves a model URI: a folder, or a version in MLflow's registry, which is downloaded once and verified.

Out of scope: changing the registry, which `serving/release` does. MLflow is imported late, so that a folder is served
without it.
"""

import contextlib
import functools
import hashlib
import json
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from gradtrail.stages.artifacts.exported import MANIFEST, Manifest, read_manifest
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError, is_store_fault, one_line
from gradtrail.support.paths import store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"  # aliases
EXPORTED = "data/export"  # folder of a logged model
MODELS = "models:/"
_LAST = "last"  # folder of the cache with the latest resolution of each URI
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for a missing alias
_MODEL_ID, _DIGEST = re.compile("m-[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")
T = TypeVar("T")


class RegistryUnavailable(UserError):  # noqa: N818 - not a mistake of the user
    """MLflow's store did not respond."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An exported model on this machine."""

    name: str
    version: str | None  # version in the registry; None for a folder and for a model that is not registered
    run_id: str | None  # run of its training; None for a folder
    digest: str  # digest of the manifest
    folder: Path  # folder with the export


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A logged model as the registry describes it, or described it when it last responded."""

    name: str
    version: str | None
    run_id: str | None
    digest: str
    model_id: str


def resolve(model: str, cache: Path = Path(".gradtrail/exports")) -> Reference:
    """Return the exported model of a URI; download it unless it is in the cache.

    If the store is unavailable, the latest resolution of the URI is used, with a warning.

    Args:
        model: URI `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/MODEL_ID`, or a folder with an export.
        cache: Folder of downloaded exports, each in a folder named by its digest.

    Raises:
        RegistryUnavailable: The store is unavailable, and the URI was never resolved here.
        UserError: There is no such model, version, alias or folder, the model is no export, or the download is damaged.
    """
    if not model.startswith(MODELS):
        return _resolve_folder(Path(model))
    record = _record_path(cache, model)
    try:
        source = _ask(lambda client: _source(client, model))
    except RegistryUnavailable as error:
        recorded = _read_record(record)
        if recorded is None or _cached(cache / recorded.digest) is None:
            raise
        print(f"warning: {error}; using the last known export of {model}, {recorded.digest[:12]}", file=sys.stderr)
        source = recorded
    folder = cache / source.digest
    if _cached(folder) is None:
        _ask(lambda client: _download(client, source, folder))
    write_json(record, asdict(source))
    return Reference(
        name=source.name, version=source.version, run_id=source.run_id, digest=source.digest, folder=folder
    )


def remember(alias: str, version: str, cache: Path = Path(".gradtrail/exports")) -> None:
    """Record that an alias refers to a version that was resolved here, for when the store is unavailable.

    Args:
        alias: URI `models:/NAME@ALIAS`.
        version: URI `models:/NAME/VERSION`.
        cache: Folder of downloaded exports, see `resolve`.
    """
    if (recorded := _read_record(_record_path(cache, version))) is not None:
        write_json(_record_path(cache, alias), asdict(recorded))


def version_of(name: str, alias: str) -> str | None:
    """Return the version of an alias, by one request; None if there is no such model or alias.

    Raises:
        RegistryUnavailable: The store is unavailable.
    """
    version = _ask(lambda client: find_alias(client, name, alias))
    return str(version.version) if version else None


def find_alias(client: "MlflowClient", name: str, alias: str) -> "ModelVersion | None":
    """Return the version of an alias; None if there is no such model or alias."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in _MISSING:
            return None
        raise


def registered_name(params: Path = Path("params.yaml")) -> str:
    """Return `export.name` of `params.yaml`: the name of the model in the registry."""
    section = read_yaml(params).get("export")
    if not isinstance(section, dict) or "name" not in section:
        raise UserError(f"{params}: export.name is missing; it names the model in MLflow's registry")
    return validate({"name": section["name"]}, _ExportName, f"{params}: export").name


def verify_export(folder: Path) -> Manifest:
    """Return the manifest of an export, after comparing every file with its digest.

    Raises:
        UserError: The manifest or a file is missing or damaged; one line.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        try:
            digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read: {error.strerror}") from None
        if digest != expected:
            raise UserError(f"{folder / name}: damaged: its SHA-256 is {digest[:12]}…, not {expected[:12]}…")
    return manifest


@dataclass(frozen=True, kw_only=True)
class _ExportName:
    name: str

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & {"/", ":", "@"}:
            raise ValueError(f"name must not be empty or contain /, : or @; got {self.name!r}")


def _resolve_folder(path: Path) -> Reference:
    folder = next((folder for folder in (path, path / EXPORTED) if (folder / MANIFEST).is_file()), None)
    if folder is None:
        forms = "models:/NAME@ALIAS, models:/NAME/VERSION, models:/MODEL_ID, or a folder with an export"
        raise UserError(f"{path}: no exported model here (no {MANIFEST}); a model is {forms}")
    manifest = verify_export(folder)
    if _DIGEST.fullmatch(folder.name) and folder.name != manifest.digest:  # a folder of the cache
        raise UserError(f"{folder}: damaged: the digest of its manifest is {manifest.digest[:12]}…, not its name")
    return Reference(name=manifest.name, version=None, run_id=None, digest=manifest.digest, folder=folder)


def _source(client: "MlflowClient", model: str) -> _Source:
    from mlflow.exceptions import MlflowException

    path = model.removeprefix(MODELS)
    name, separator, alias = path.rpartition("@")
    try:
        if separator:
            version = find_alias(client, name, alias)
            if version is None:
                raise UserError(f"{model}: the registry has no alias {alias} of {name}; `gradtrail promote` sets it")
            return source_of_version(client, version)
        if _MODEL_ID.fullmatch(path):
            return _logged_model_source(client, path, version=None)
        name, separator, number = path.rpartition("/")
        if not separator or not number.isdecimal():
            raise UserError(f"{model}: must be models:/NAME@ALIAS, models:/NAME/VERSION or models:/MODEL_ID")
        return source_of_version(client, client.get_model_version(name, number))
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        raise UserError(f"{model}: not in MLflow's store: {one_line(error)[:200]}") from None


def source_of_version(client: "MlflowClient", version: "ModelVersion") -> _Source:
    """Return the logged model of a version; raise UserError if it does not exist."""
    model_id = version.model_id or str(version.source).removeprefix(MODELS)
    if not _MODEL_ID.fullmatch(model_id):
        raise UserError(f"models:/{version.name}/{version.version}: was not registered by `gradtrail promote`")
    return _logged_model_source(client, model_id, version=version)


def _logged_model_source(client: "MlflowClient", model_id: str, version: "ModelVersion | None") -> _Source:
    from gradtrail.tracking.models import EXPORT_DIGEST

    logged = client.get_logged_model(model_id)
    if EXPORT_DIGEST not in logged.tags:
        raise UserError(f"models:/{model_id}: has no export; `dvc repro export` makes one")
    return _Source(
        name=version.name if version else logged.name,
        version=str(version.version) if version else None,
        run_id=logged.source_run_id,
        digest=_check_digest(logged.tags[EXPORT_DIGEST], model_id),
        model_id=model_id,
    )


def _check_digest(digest: str, model_id: str) -> str:
    """Return a digest; raise UserError if it is none: people can edit the tag, and it becomes a folder's name."""
    if not _DIGEST.fullmatch(digest):
        raise UserError(f"models:/{model_id}: its tag export_digest is no SHA-256: {digest[:80]!r}")
    return digest


def _download(client: "MlflowClient", source: _Source, folder: Path) -> None:
    """Download an export to a temporary folder, verify it, and rename it; of two processes the first one wins."""
    import mlflow

    temporary = folder.with_name(f".{folder.name[:12]}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        uri = f"{client.get_logged_model(source.model_id).artifact_location}/{EXPORTED}"
        try:
            download = mlflow.artifacts.download_artifacts(
                uri, dst_path=str(temporary), tracking_uri=client.tracking_uri
            )
        except Exception as error:
            if not is_store_fault(error):
                raise
            raise UserError(f"{uri}: the export cannot be downloaded: {one_line(error)[-200:]}") from None
        try:
            manifest = verify_export(Path(download))
        except UserError as error:
            raise UserError(f"{MODELS}{source.model_id}: the download is damaged: {error}") from None
        if manifest.digest != source.digest:
            difference = f"the digest of its manifest is {manifest.digest[:12]}…, not {source.digest[:12]}…"
            raise UserError(f"{MODELS}{source.model_id}: the download is damaged: {difference}")
        if _cached(folder) is None:
            if folder.exists():  # damaged
                folder.rename(temporary / "damaged")
            with contextlib.suppress(OSError):  # another process was first
                Path(download).rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cached(folder: Path) -> Manifest | None:
    """Return the manifest of an export in the cache; None if it is missing or damaged."""
    with contextlib.suppress(UserError):
        manifest = verify_export(folder)
        return manifest if manifest.digest == folder.name else None
    return None


def _record_path(cache: Path, model: str) -> Path:
    """Return the file with the latest resolution of a URI."""
    return cache / _LAST / f"{quote(f'{store_uri()} {model}', safe='')[-200:]}.json"


def _read_record(path: Path) -> _Source | None:
    with contextlib.suppress(OSError, UserError, ValueError):
        return validate(json.loads(path.read_text(encoding="utf-8")), _Source, path.name)
    return None


def _ask(question: "Callable[[MlflowClient], T]") -> T:
    """Return the answer of the store; raise RegistryUnavailable if it does not respond."""
    try:
        return question(_client(store_uri()))
    except UserError:
        raise
    except Exception as error:
        if not is_store_fault(error):
            raise
        raise RegistryUnavailable(f"MLflow's registry does not respond: {one_line(error)[:200]}") from None


@functools.cache  # opening a store is slow, and a server asks every few seconds
def _client(uri: str) -> Any:  # noqa: ARG001 - the key of the cache
    from gradtrail.tracking.store import open_store

    return open_store()
