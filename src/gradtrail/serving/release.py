"""`gradtrail promote` and `gradtrail rollback`: register exports, and move the alias champion of MLflow's registry.

The history of the alias is in tags of the versions, one for each move. The registry has no compare-and-set, so a move
writes its tag first, and reads all tags and the alias again: of concurrent moves at most one has not seen another one,
and the recorded stop. Out of scope: an alias that is moved in MLflow's UI between this last look and the move.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import mlflow
import numpy as np
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from gradtrail.serving.candidate import Candidate, find_candidate, find_champion, paired_predictions
from gradtrail.serving.registry import CHALLENGER, CHAMPION, MODELS, registered_name, version_of
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict import ARTIFACT, PASS, verdict_tag
from gradtrail.support.errors import UserError, printable
from gradtrail.support.git import git
from gradtrail.support.significance import mcnemar, paired_difference, unpaired_difference
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import EXPORT_DIGEST, MOVE, REASON, VERDICT

_TAG = re.compile(re.escape(MOVE) + r"\d{6}\.[0-9a-f]{8}")
_STALE = timedelta(minutes=1)  # longest time between the tag of a move and the move
_PROMOTED, _ROLLED_BACK = "promoted", "rolled back"


class Move(NamedTuple):
    """A move of the alias champion."""

    key: str  # name of its tag, champion.NUMBER.TOKEN; moves are ordered by it
    version: str  # the new champion
    kind: str
    replaced: str | None  # the previous champion; None if there was none
    time: str  # UTC


def promote(run: str, *, as_champion: bool, is_forced: bool, reason: str) -> int:
    """Register the export of a run, and move an alias to it; return the exit status, 1 if that was refused."""
    if is_forced and not as_champion:
        raise UserError("--force: needs --champion; `challenger` is never refused")
    name, client = registered_name(), open_store()
    candidate = find_candidate(run, client)
    if candidate.manifest.name != name:
        exported = candidate.manifest.name
        raise UserError(f"params.yaml: export.name is {name}, but {candidate.name} was exported as {exported}")
    version, champion = _register(name, candidate), version_of(name, CHAMPION)
    if version == champion:
        _print(f"version {version} of {name} is already champion")
        return 0
    if not as_champion:
        client.set_registered_model_alias(name, CHALLENGER, version)
        if reason:
            client.set_model_version_tag(name, version, REASON, reason)
        _print(f"version {version} of {name} is challenger")
        return 0

    reasons = _reasons_against(candidate)
    for line in reasons:
        _print(f"{'Forced despite' if is_forced else 'Refused'}: {line}")
    if reasons and not is_forced:
        _print(f"{candidate.name} is registered as version {version} of {name!r}, but {CHAMPION!r} was not moved.")
        return 1
    move_champion(client, name, version, _PROMOTED, replaced=champion, reason=reason, forced="; ".join(reasons))
    if version_of(name, CHALLENGER) == version:
        client.delete_registered_model_alias(name, CHALLENGER)
    _print(f"version {version} of {name} is champion{_replaced(champion)}: {candidate.name}")
    return 0


def rollback(reason: str) -> int:
    """Move the alias champion back to the previous champion, see `previous_champion`; return the exit status."""
    name, client = registered_name(), open_store()
    champion = version_of(name, CHAMPION)
    target = previous_champion(moves_of(name), champion)
    if target is None:
        state = f"version {champion} is champion, and the history has none before it" if champion else "no champion"
        raise UserError(f"{name}: {state}; nothing to roll back to")
    move_champion(client, name, target, _ROLLED_BACK, replaced=champion, reason=reason)
    _print(f"version {target} of {name} is champion again{_replaced(champion)}")
    return 0


def _replaced(champion: str | None) -> str:
    return f", in place of version {champion}" if champion else ""


def versions_of(name: str) -> list[ModelVersion]:
    """Return the versions of a model that are not deleted, the newest first."""
    return list(mlflow.search_model_versions(filter_string=f"name = '{name}'", order_by=["version_number DESC"]))


def _register(name: str, candidate: Candidate) -> str:
    """Return the version of an export, which is registered if it has none; a name is for one data set."""
    client, versions = candidate.client, versions_of(name)
    if same := [version for version in versions if version.tags.get(EXPORT_DIGEST) == candidate.export.digest]:
        return str(same[-1].version)
    if versions and versions[0].run_id in candidate.index:
        last = candidate.index[versions[0].run_id].data.tags.get("dataset")
        dataset = candidate.run.data.tags.get("dataset")
        if last and dataset and last != dataset:
            difference = f"version {versions[0].version} of {name} was trained on {last}, {candidate.name} on {dataset}"
            raise UserError(f"params.yaml: export.name: {difference}; choose another name and run `dvc repro export`")
    with contextlib.suppress(MlflowException):  # it exists already; the next call reports any other error
        client.create_registered_model(name)
    source, tags = f"{MODELS}{candidate.export.model_id}", {EXPORT_DIGEST: candidate.export.digest}
    run_id, model_id = candidate.run.info.run_id, candidate.export.model_id
    return str(client.create_model_version(name, source, run_id=run_id, tags=tags, model_id=model_id).version)


def _reasons_against(candidate: Candidate) -> list[str]:
    """Return the reasons why a model may not become champion; print its comparison with the champion."""
    reasons, run = [], candidate.exported or candidate.run
    verdict = candidate.run.data.tags.get(VERDICT, "")
    if candidate.export.digest not in verdict:
        reasons.append(f"no verdict of this export; run `gradtrail verdict {run.info.run_id[:8]}` first")
    elif not verdict.startswith(PASS):
        reasons.append(f"the verdict is fail; see the run's artifact {ARTIFACT}")
    elif verdict != verdict_tag(PASS, candidate.export.digest, read_slo().limits):
        reasons.append("the limits in deploy/slo.yaml changed after the verdict; run `gradtrail verdict` again")
    try:
        if champion := find_champion(candidate):
            for text, is_worse in (compare_examples(candidate, champion), compare_seeds(candidate, champion)):
                _print(text)
                reasons += [f"worse than the champion on the {text}"] if is_worse else []
    except UserError as error:
        reasons.append(f"cannot be compared with the champion: {error}")
    return reasons


def compare_examples(candidate: Candidate, champion: Candidate) -> tuple[str, bool]:
    """Compare two models on the same test examples; return the result in words, and whether the first is worse."""
    labels, predicted, by_champion = paired_predictions(candidate, champion)
    hits, champion_hits = predicted == labels, by_champion == labels
    test = mcnemar(int(np.sum(hits & ~champion_hits)), int(np.sum(~hits & champion_hits)), len(labels))
    points = _points(test.difference, test.low, test.high)
    counts = f"{test.gained} gained, {test.lost} lost of {test.num_examples:,}"
    return f"test split: {points}, exact McNemar p = {test.p_value:.3g} ({counts})", test.is_worse


def compare_seeds(candidate: Candidate, champion: Candidate) -> tuple[str, bool]:
    """Compare the accuracies of the members of two models, as `compare_examples` does.

    Members with equal seeds are compared in pairs if there are at least two of them: they start from the same weights
    and get the same order of examples. Other members are compared by Welch's test.
    """
    first, second = candidate.accuracies, champion.accuracies
    if min(len(first), len(second)) < 2:
        return "seeds: not compared, as one of the two has a single network", False
    common = sorted(first.keys() & second.keys())
    if len(common) > 1:
        test = "paired t-test"
        difference = paired_difference([first[seed] for seed in common], [second[seed] for seed in common])
    else:
        test = "Welch's t-test"
        difference = unpaired_difference([*first.values()], [*second.values()])
    points = _points(difference.mean, difference.low, difference.high)
    return f"seeds: {points}, {test} p = {difference.p_value:.3g}", difference.high < 0


def _points(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] points of accuracy"


def moves_of(name: str) -> list[Move]:
    """Return the moves of the alias in their order; those to a deleted version were deleted with it."""
    moves = []
    for version in versions_of(name):
        for key, value in version.tags.items():
            if _TAG.fullmatch(key):
                content = json.loads(value)
                fields = (content[field] for field in ("kind", "replaced", "time"))
                moves.append(Move(key, str(version.version), *fields))
    return sorted(moves)


def previous_champion(moves: Iterable[Move], champion: str | None) -> str | None:
    """Return the version to roll back to; None if the history has none.

    If somebody moved the alias by hand, it is the champion before the alias's version, or the last recorded champion.
    """
    stack: list[str] = []  # successive champions that were not rolled back
    for move in moves:
        before = move.version if move.kind == _ROLLED_BACK else move.replaced
        if before in stack:
            while stack[-1] != before:
                stack.pop()
        if stack[-1:] != [move.version]:
            stack.append(move.version)
    if champion in stack:
        while stack.pop() != champion:
            pass
    return stack[-1] if stack else None


def move_champion(
    client: MlflowClient, name: str, version: str, kind: str, *, replaced: str | None, reason: str, forced: str = ""
) -> None:
    """Move the alias champion from the version `replaced`, and record it; UserError if another process moves it."""
    number = max((int(move.key.split(".")[1]) for move in moves_of(name)), default=0) + 1
    key = f"{MOVE}{number:06}.{secrets.token_hex(4)}"
    content = {
        "kind": kind,
        "replaced": replaced,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": git("config", "user.name") or os.environ.get("USER", "unknown"),
        "reason": reason,
        "forced": forced,
    }
    client.set_model_version_tag(name, version, key, json.dumps(content, sort_keys=True))
    try:
        # A recent move that the alias does not show yet is under way; an older one was killed, or undone by hand.
        recorded = [move for move in moves_of(name) if move.key != key]
        is_recent = bool(recorded) and datetime.now(UTC) - datetime.fromisoformat(recorded[-1].time) < _STALE
        if (is_recent and recorded[-1].version != replaced) or version_of(name, CHAMPION) != replaced:
            raise UserError(f"{name}: somebody else is moving {CHAMPION}; try again")
        client.set_registered_model_alias(name, CHAMPION, version)
    except BaseException:
        client.delete_model_version_tag(name, version, key)
        raise


def _print(text: str) -> None:
    print(printable(text))
