"""`gradtrail promote RUN`: registers an exported model as a version, and moves the alias challenger or champion."""

import contextlib
import time

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from gradtrail.serving.candidate import Candidate, candidate_of, find_candidate
from gradtrail.serving.registry import (
    CHALLENGER,
    CHAMPION,
    find_alias,
    registered_name,
    source_of_version,
    verify_export,
)
from gradtrail.serving.release.comparison import Comparison, compare
from gradtrail.serving.release.history import Event, PromotionRefused, claim_of, events_of, move, user, versions_of
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict.judge import PASS
from gradtrail.serving.verdict.main import ARTIFACT, VERDICT, verdict_tag
from gradtrail.support.errors import UserError, printable
from gradtrail.tracking.models import EXPORT_DIGEST
from gradtrail.tracking.store import open_store


def promote(run: str, *, as_champion: bool, is_forced: bool, reason: str) -> int:
    """Register the export of a run, and move an alias to it.

    Args:
        run: The run, see `find_run`.
        as_champion: True to move `champion`, if verdict and comparison allow it; else `challenger` is moved.
        is_forced: True to move `champion` in any case; the version's tags hold the reasons against it.
        reason: Reason for the history.

    Returns:
        The exit status: 0, or 1 if the promotion was refused.

    Raises:
        UserError: There is no such run or no export, or the store failed; one line.
    """
    if is_forced and not as_champion:
        raise UserError("--force: needs --champion; `challenger` is never refused")
    name, client = registered_name(), open_store()
    candidate = find_candidate(run, client)
    verify_export(candidate.export.folder)
    if candidate.manifest.name != name:
        exported = candidate.manifest.name
        raise UserError(f"params.yaml: export.name is {name}, but {candidate.name} was exported as {exported}")
    _require_same_dataset(client, name, candidate)
    version = register(client, name, candidate)
    try:
        if as_champion:
            _make_champion(client, name, candidate, version, is_forced=is_forced, reason=reason)
        else:
            _make_challenger(client, name, version, reason)
    except PromotionRefused as refused:
        alias = CHAMPION if as_champion else CHALLENGER
        registered = f"{candidate.name} is registered as version {version.version} of {name!r}"
        _print(f"Refused: {registered}, but {alias!r} was not moved.")
        for line in str(refused).splitlines():
            _print(f"  {line}")
        return 1
    return 0


def _require_same_dataset(client: MlflowClient, name: str, candidate: Candidate) -> None:
    """Refuse an export if the last version of its name was trained on another data set: a name is for one task."""
    last = next(iter(versions_of(client, name)), None)
    if last is None or not last.run_id:
        return
    with contextlib.suppress(MlflowException):  # its run was deleted
        runs = client.get_run(last.run_id), candidate.run
        last_dataset, dataset = (run.data.tags.get("dataset") for run in runs)
        if last_dataset and dataset and last_dataset != dataset:
            difference = (
                f"version {last.version} of {name} was trained on {last_dataset}, {candidate.name} on {dataset}"
            )
            raise UserError(f"params.yaml: export.name: {difference}; choose another name and run `dvc repro export`")


def register(client: MlflowClient, name: str, candidate: Candidate) -> ModelVersion:
    """Return the version of an export, and register it if it has none; of two processes the first one wins."""
    if version := _registered(client, name, candidate.digest):
        return version
    with contextlib.suppress(MlflowException):  # it exists already; the next call reports any other error
        client.create_registered_model(name)
    tags = {EXPORT_DIGEST: candidate.digest, "registered_by": user()}
    source, run_id = f"models:/{candidate.model_id}", candidate.run.info.run_id
    made = client.create_model_version(name, source, run_id=run_id, tags=tags, model_id=candidate.model_id)
    first = _registered(client, name, candidate.digest)
    if first is None or first.version == made.version:
        return made
    client.delete_model_version(name, made.version)
    return first


def allowed(candidate: Candidate, champion: Candidate | None) -> tuple[list[str], Comparison | None]:
    """Return the reasons why a model may not become champion, and its comparison with the champion."""
    reasons, comparison = [], None
    verdict = candidate.client.get_run(candidate.run.info.run_id).data.tags.get(VERDICT, "")
    if candidate.digest not in verdict:
        reasons.append(f"no verdict of this export; run `gradtrail verdict {candidate.run.info.run_id[:8]}` first")
    elif not verdict.startswith(PASS):
        reasons.append(f"the verdict is fail; see the run's artifact {ARTIFACT}")
    elif verdict != verdict_tag(PASS, candidate.digest, read_slo().limits.digest):
        reasons.append("the limits in deploy/slo.yaml changed after the verdict; run `gradtrail verdict` again")
    if champion:
        try:
            comparison = compare(candidate, champion)
            reasons += comparison.worse
        except UserError as error:
            reasons.append(f"cannot be compared with the champion: {error}")
    return reasons, comparison


def _make_champion(
    client: MlflowClient, name: str, candidate: Candidate, version: ModelVersion, *, is_forced: bool, reason: str
) -> None:
    now = find_alias(client, name, CHAMPION)
    if now and now.version == version.version:
        _print(f"version {version.version} of {name} is already champion")
        return
    events = events_of(versions_of(client, name))
    reasons, comparison = _reasons(client, candidate, now)
    if comparison:
        _print(f"test split: {comparison.examples_in_words}")
        _print(f"seeds: {comparison.seeds_in_words}")
    if reasons and not is_forced:
        raise PromotionRefused("\n".join(reasons))
    replaced = str(now.version) if now else None
    overruled = "; ".join(reasons) if is_forced else ""
    event = claim_of(events, str(version.version), "promoted", replaced=replaced, reason=reason, forced=overruled)
    move(client, name, event)
    tag_promotion(client, name, event)
    challenger = find_alias(client, name, CHALLENGER)
    if challenger and challenger.version == version.version:
        client.delete_registered_model_alias(name, CHALLENGER)
    before = f", in place of version {replaced}" if replaced else ""
    _print(f"version {version.version} of {name} is champion{before}: {candidate.name}")
    if overruled:
        _print(f"forced despite: {overruled}")


def _reasons(
    client: MlflowClient, candidate: Candidate, now: ModelVersion | None
) -> tuple[list[str], Comparison | None]:
    """Return the reasons why a model may not replace the champion, and their comparison."""
    if now is None:
        return allowed(candidate, None)
    try:
        source = source_of_version(client, now)
        if source.run_id is None or source.run_id not in candidate.index:
            raise UserError(f"the run of version {now.version} is gone")
        champion = candidate_of(candidate.index[source.run_id], client, candidate.index, source.digest)
    except UserError as error:
        reasons, _ = allowed(candidate, None)
        return [*reasons, f"cannot be compared with the champion: {error}"], None
    return allowed(candidate, champion)


def tag_promotion(client: MlflowClient, name: str, event: Event) -> None:
    """Tag a new champion with its last promotion, for people who look at the version."""
    tags = {"promoted_at": event.time, "promoted_by": event.by, "replaced": event.replaced or "none"}
    tags |= {"reason": event.reason} if event.reason else {}
    tags |= {"forced": event.forced} if event.forced else {}
    for key, value in tags.items():
        client.set_model_version_tag(name, event.version, key, value)
    for key in {"reason", "forced", "rolled_back"} & client.get_model_version(name, event.version).tags.keys():
        if key not in tags:  # of an earlier promotion
            client.delete_model_version_tag(name, event.version, key)


def _make_challenger(client: MlflowClient, name: str, version: ModelVersion, reason: str) -> None:
    now = find_alias(client, name, CHAMPION)
    if now and now.version == version.version:
        _print(f"version {version.version} of {name} is already champion")
        return
    client.set_registered_model_alias(name, CHALLENGER, version.version)
    tags = {"challenger_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "challenger_by": user()}
    tags |= {"reason": reason} if reason else {}
    for key, value in tags.items():
        client.set_model_version_tag(name, version.version, key, value)
    again = find_alias(client, name, CHALLENGER)
    if again is None or again.version != version.version:
        raise PromotionRefused(
            f"somebody else moved {CHALLENGER} meanwhile: it is version {again.version if again else '–'}"
        )
    _print(f"version {version.version} of {name} is challenger")


def _registered(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    """Return the first version of an export."""
    versions = [version for version in versions_of(client, name) if version.tags.get(EXPORT_DIGEST) == digest]
    return versions[-1] if versions else None


def _print(text: str) -> None:
    print(printable(text))
