"""`gradtrail promote RUN`: an exported model becomes a version in the registry, and challenger or champion."""

import contextlib
import time

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from gradtrail.serving.candidate import Candidate, candidate_of, find_candidate
from gradtrail.serving.registry import (
    CHALLENGER,
    CHAMPION,
    of_alias,
    registered_name,
    source_of_version,
    verify_export,
)
from gradtrail.serving.release.comparison import Comparison, compare
from gradtrail.serving.release.history import Event, Refused, claim_of, events_of, move, user, versions_of
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict.judge import PASS
from gradtrail.serving.verdict.main import ARTIFACT, VERDICT, verdict_tag
from gradtrail.support.errors import UserError, printable
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.models import EXPORT_DIGEST


def promote(what: str, *, as_champion: bool, is_forced: bool, reason: str) -> int:
    """Register the export of a run, and move an alias to it.

    Args:
        what: the run, see `find_run`.
        as_champion: move `champion`, if verdict and comparison allow it; else `challenger`.
        is_forced: move `champion` in any case; the version says what was overruled.
        reason: why, for the history.

    Returns:
        The exit status: 0, or 1 where the promotion was refused.

    Raises:
        UserError: no such run, no export, or the store failed; one line.
    """
    if is_forced and not as_champion:
        raise UserError("--force: only `--champion` is ever refused; use both, or neither")
    name, client = registered_name(), open_store()
    candidate = find_candidate(what, client)
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
    except Refused as refused:
        _tell(f"refused: {candidate.name} stays version {version.version} of {name}, and no champion")
        for line in str(refused).splitlines():
            _tell(f"  {line}")
        return 1
    return 0


def _require_same_dataset(client: MlflowClient, name: str, candidate: Candidate) -> None:
    """Refuse an export under a name whose last version was trained on another data set: a name stands for one task."""
    last = next(iter(versions_of(client, name)), None)
    if last is None or not last.run_id:
        return
    with contextlib.suppress(MlflowException):  # its run is gone
        runs = client.get_run(last.run_id), candidate.run
        before, own = (run.data.tags.get("dataset") for run in runs)
        if before and own and before != own:
            said = f"version {last.version} of {name} was trained on {before}, {candidate.name} on {own}"
            raise UserError(f"params.yaml: export.name: {said}; give it another name and run `dvc repro export`")


def register(client: MlflowClient, name: str, candidate: Candidate) -> ModelVersion:
    """Return the version of an export, which is registered unless it was: of two processes the first one's counts."""
    if found := _registered(client, name, candidate.digest):
        return found
    with contextlib.suppress(MlflowException):  # it exists already; any other fault is told by what follows
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
    """Return why a model may not become champion, a sentence each, and its comparison with the one that is."""
    reasons, comparison = [], None
    verdict = candidate.client.get_run(candidate.run.info.run_id).data.tags.get(VERDICT, "")
    if candidate.digest not in verdict:
        reasons.append(f"no verdict of this export; run `gradtrail verdict {candidate.run.info.run_id[:8]}` first")
    elif not verdict.startswith(PASS):
        reasons.append(f"the verdict is fail; see the run's artifact {ARTIFACT}")
    elif verdict != verdict_tag(PASS, candidate.digest, read_slo().limits.digest):
        reasons.append("the verdict is of other limits than deploy/slo.yaml's; run `gradtrail verdict` again")
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
    now = of_alias(client, name, CHAMPION)
    if now and now.version == version.version:
        _tell(f"version {version.version} of {name} is champion already")
        return
    events = events_of(versions_of(client, name))
    reasons, comparison = _reasons(client, candidate, now)
    if comparison:
        _tell(f"test split: {comparison.examples_in_words}")
        _tell(f"seeds: {comparison.seeds_in_words}")
    if reasons and not is_forced:
        raise Refused("\n".join(reasons))
    replaced = str(now.version) if now else None
    overruled = "; ".join(reasons) if is_forced else ""
    event = claim_of(events, str(version.version), "promoted", replaced=replaced, reason=reason, forced=overruled)
    move(client, name, event)
    tell_tags(client, name, event)
    challenger = of_alias(client, name, CHALLENGER)
    if challenger and challenger.version == version.version:
        client.delete_registered_model_alias(name, CHALLENGER)
    before = f", in place of version {replaced}" if replaced else ""
    _tell(f"version {version.version} of {name} is champion{before}: {candidate.name}")
    if overruled:
        _tell(f"forced, although: {overruled}")


def _reasons(
    client: MlflowClient, candidate: Candidate, now: ModelVersion | None
) -> tuple[list[str], Comparison | None]:
    """Return why a model may not take the champion's place."""
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


def tell_tags(client: MlflowClient, name: str, event: Event) -> None:
    """Tag the version that an event made champion with its last promotion, for people who look at it."""
    tags = {"promoted_at": event.at, "promoted_by": event.by, "replaced": event.replaced or "none"}
    tags |= {"reason": event.reason} if event.reason else {}
    tags |= {"forced": event.forced} if event.forced else {}
    for key, value in tags.items():
        client.set_model_version_tag(name, event.version, key, value)
    for key in {"reason", "forced", "rolled_back"} & client.get_model_version(name, event.version).tags.keys():
        if key not in tags:  # of an earlier promotion
            client.delete_model_version_tag(name, event.version, key)


def _make_challenger(client: MlflowClient, name: str, version: ModelVersion, reason: str) -> None:
    now = of_alias(client, name, CHAMPION)
    if now and now.version == version.version:
        _tell(f"version {version.version} of {name} is champion; it needs no challenge")
        return
    client.set_registered_model_alias(name, CHALLENGER, version.version)
    tags = {"challenger_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "challenger_by": user()}
    tags |= {"reason": reason} if reason else {}
    for key, value in tags.items():
        client.set_model_version_tag(name, version.version, key, value)
    again = of_alias(client, name, CHALLENGER)
    if again is None or again.version != version.version:
        raise Refused(f"somebody else moved {CHALLENGER} meanwhile: it is version {again.version if again else '–'}")
    _tell(f"version {version.version} of {name} is challenger")


def _registered(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    """Return the first version of an export."""
    of_digest = [each for each in versions_of(client, name) if each.tags.get(EXPORT_DIGEST) == digest]
    return of_digest[-1] if of_digest else None


def _tell(text: str) -> None:
    print(printable(text))
