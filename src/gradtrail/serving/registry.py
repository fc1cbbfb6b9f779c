"""Which exported model a URI means: a folder, or a version in MLflow's registry, downloaded once and verified.

Out of scope: changing the registry, which `serving/release` does. MLflow is imported where the registry is asked, so
that a folder is served without it.
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
_LAST = "last"  # folder of the cache: what a URI meant when the registry was last in reach
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # what MLflow says of an alias that is not there
_MODEL_ID, _DIGEST = re.compile("m-[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")
T = TypeVar("T")


class RegistryUnavailable(UserError):  # noqa: N818 - not a mistake of the user
    """MLflow's store did not answer."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An exported model on this machine.

    Attributes:
        name: of the model.
        version: in the registry; None for a folder and for a model that is not registered.
        run_id: of its training; None for a folder.
        digest: of the manifest.
        folder: with the export.
    """

    name: str
    version: str | None
    run_id: str | None
    digest: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A logged model: what the registry says, or said when it was last in reach."""

    name: str
    version: str | None
    run_id: str | None
    digest: str
    model_id: str


def resolve(model: str, cache: Path = Path(".gradtrail/exports")) -> Reference:
    """Return the exported model that a URI means; download it unless it is in the cache.

    Where the store is out of reach, what the URI meant the last time is used, with a warning.

    Args:
        model: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/MODEL_ID`, or a folder with an export.
        cache: folder of downloaded exports, each in a folder of its digest.

    Raises:
        RegistryUnavailable: the store is out of reach, and the URI was never resolved here.
        UserError: there is no such model, version, alias or folder, the model is no export, or the download is damaged.
    """
    if not model.startswith(MODELS):
        return _of_folder(Path(model))
    last = _last(cache, model)
    try:
        source = _ask(lambda client: _source(client, model))
    except RegistryUnavailable as error:
        if (known := _read_last(last)) is None or _cached(cache / known.digest) is None:
            raise
        print(f"warning: {error}; {model} is taken to be what it was, {known.digest[:12]}", file=sys.stderr)
        source = known
    folder = cache / source.digest
    if _cached(folder) is None:
        _ask(lambda client: _download(client, source, folder))
    write_json(last, asdict(source))
    return Reference(
        name=source.name, version=source.version, run_id=source.run_id, digest=source.digest, folder=folder
    )


def remember(alias: str, version: str, cache: Path = Path(".gradtrail/exports")) -> None:
    """Note that an alias means a version that was resolved here, for when the store is out of reach.

    Args:
        alias: URI `models:/NAME@ALIAS`.
        version: URI `models:/NAME/VERSION`.
        cache: as of `resolve`.
    """
    if (known := _read_last(_last(cache, version))) is not None:
        write_json(_last(cache, alias), asdict(known))


def version_of(name: str, alias: str) -> str | None:
    """Return the version that an alias names, by one request; None where there is no such model or alias.

    Raises:
        RegistryUnavailable: the store is out of reach.
    """
    found = _ask(lambda client: of_alias(client, name, alias))
    return str(found.version) if found else None


def of_alias(client: "MlflowClient", name: str, alias: str) -> "ModelVersion | None":
    """Return the version that an alias names; None where there is no such model or alias."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in _MISSING:
            return None
        raise


def registered_name(params: Path = Path("params.yaml")) -> str:
    """Return `export.name` of `params.yaml`: the name of the model in the registry."""
    content = read_yaml(params)
    if "export" not in content:
        raise UserError(f"{params}: section 'export' is missing; its key `name` names the model in MLflow's registry")
    return validate(content["export"], _Named, f"{params}: export", extra="ignore").name


def verify_export(folder: Path) -> Manifest:
    """Return the manifest of an export of which every file is the one that was written.

    Raises:
        UserError: the manifest or a file is missing, or damaged; one line.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read: {error.strerror}") from None
        if found != expected:
            raise UserError(f"{folder / name}: damaged: its SHA-256 is {found[:12]}…, not {expected[:12]}…")
    return manifest


@dataclass(frozen=True, kw_only=True)
class _Named:
    name: str

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & {"/", ":", "@"}:
            raise ValueError(f"name must not be empty or contain /, : or @; got {self.name!r}")


def _of_folder(path: Path) -> Reference:
    folder = next((each for each in (path, path / EXPORTED) if (each / MANIFEST).is_file()), None)
    if folder is None:
        forms = "models:/NAME@ALIAS, models:/NAME/VERSION, models:/MODEL_ID, or a folder with an export"
        raise UserError(f"{path}: no exported model here (no {MANIFEST}); a model is {forms}")
    manifest = verify_export(folder)
    if _DIGEST.fullmatch(folder.name) and folder.name != manifest.digest:  # a folder of the cache
        raise UserError(f"{folder}: damaged: the digest of its manifest is {manifest.digest[:12]}…, not its name")
    return Reference(name=manifest.name, version=None, run_id=None, digest=manifest.digest, folder=folder)


def _source(client: "MlflowClient", model: str) -> _Source:
    from mlflow.exceptions import MlflowException

    what = model.removeprefix(MODELS)
    name, at, alias = what.rpartition("@")
    try:
        if at:
            version = of_alias(client, name, alias)
            if version is None:
                raise UserError(f"{model}: the registry has no alias {alias} of {name}; `gradtrail promote` sets it")
            return source_of_version(client, version)
        if _MODEL_ID.fullmatch(what):
            return _of_logged_model(client, what, version=None)
        name, slash, number = what.rpartition("/")
        if not slash or not number.isdecimal():
            raise UserError(f"{model}: must be models:/NAME@ALIAS, models:/NAME/VERSION or models:/MODEL_ID")
        return source_of_version(client, client.get_model_version(name, number))
    except MlflowException as error:
        if error.error_code not in _MISSING:
            raise
        raise UserError(f"{model}: not in MLflow's store: {one_line(error)[:200]}") from None


def source_of_version(client: "MlflowClient", version: "ModelVersion") -> _Source:
    """Return the logged model of a version; raise UserError where it is gone."""
    model_id = version.model_id or str(version.source).removeprefix(MODELS)
    if not _MODEL_ID.fullmatch(model_id):
        raise UserError(f"models:/{version.name}/{version.version}: was not registered by `gradtrail promote`")
    return _of_logged_model(client, model_id, version=version)


def _of_logged_model(client: "MlflowClient", model_id: str, version: "ModelVersion | None") -> _Source:
    from gradtrail.tracking.mlflow.models import EXPORT_DIGEST

    logged = client.get_logged_model(model_id)
    if EXPORT_DIGEST not in logged.tags:
        raise UserError(f"models:/{model_id}: has no export; `dvc repro export` makes one")
    return _Source(
        name=version.name if version else logged.name,
        version=str(version.version) if version else None,
        run_id=logged.source_run_id,
        digest=_safe(logged.tags[EXPORT_DIGEST], model_id),
        model_id=model_id,
    )


def _safe(digest: str, model_id: str) -> str:
    """Return a digest; raise UserError where the tag is none, as people can edit it and it becomes a folder's name."""
    if not _DIGEST.fullmatch(digest):
        raise UserError(f"models:/{model_id}: its tag export_digest is no SHA-256: {digest[:80]!r}")
    return digest


def _download(client: "MlflowClient", source: _Source, folder: Path) -> None:
    """Download an export beside its place, verify it, and rename it; of two processes the first one's is kept."""
    import mlflow

    beside = folder.with_name(f".{folder.name[:12]}.{secrets.token_hex(4)}.tmp")
    beside.mkdir(parents=True)
    try:
        uri = f"{client.get_logged_model(source.model_id).artifact_location}/{EXPORTED}"
        where = {"dst_path": str(beside), "tracking_uri": client.tracking_uri}
        try:
            found = Path(mlflow.artifacts.download_artifacts(uri, **where))
        except Exception as error:
            if not is_store_fault(error):
                raise
            raise UserError(f"{uri}: the export cannot be downloaded: {one_line(error)[-200:]}") from None
        try:
            manifest = verify_export(found)
        except UserError as error:
            raise UserError(f"{MODELS}{source.model_id}: the download is damaged: {error}") from None
        if manifest.digest != source.digest:
            said = f"the digest of its manifest is {manifest.digest[:12]}…, not {source.digest[:12]}…"
            raise UserError(f"{MODELS}{source.model_id}: the download is damaged: {said}")
        if _cached(folder) is None:
            if folder.exists():  # damaged
                folder.rename(beside / "damaged")
            with contextlib.suppress(OSError):  # another process was first
                found.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _cached(folder: Path) -> Manifest | None:
    """Return the manifest of an export in the cache; None where it is missing or damaged."""
    with contextlib.suppress(UserError):
        manifest = verify_export(folder)
        return manifest if manifest.digest == folder.name else None
    return None


def _last(cache: Path, model: str) -> Path:
    """Return the file that notes what a URI means."""
    return cache / _LAST / f"{quote(f'{store_uri()} {model}', safe='')[-200:]}.json"


def _read_last(path: Path) -> _Source | None:
    with contextlib.suppress(OSError, UserError, ValueError):
        return validate(json.loads(path.read_text(encoding="utf-8")), _Source, path.name)
    return None


def _ask(question: "Callable[[MlflowClient], T]") -> T:
    """Return the answer of the store; raise RegistryUnavailable where there is none."""
    try:
        return question(_client(store_uri()))
    except UserError:
        raise
    except Exception as error:
        if not is_store_fault(error):
            raise
        raise RegistryUnavailable(f"MLflow's registry does not respond: {one_line(error)[:200]}") from None


@functools.cache  # opening a store takes long, and a server asks every few seconds
def _client(uri: str) -> Any:  # noqa: ARG001 - which store is open
    from gradtrail.tracking.mlflow.client import open_store

    return open_store()
