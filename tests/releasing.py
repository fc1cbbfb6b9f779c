"""What a person does who releases a model, and what the store then says."""

import shutil
from pathlib import Path

from factories import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run
from registered import LABELS

from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.registry import version_of
from gradtrail.serving.release.history import Event, events_of, versions_of
from gradtrail.serving.release.promote import promote
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict.main import verdict_tag

RIGHT = LABELS.copy()
NAME = "digits"


def judge(client: MlflowClient, run: Run, verdict: str) -> None:
    Path("deploy").mkdir(exist_ok=True)
    shutil.copy(ROOT / "deploy/slo.yaml", "deploy")
    candidate = find_candidate(run.info.run_id, client)
    if verdict:
        tag = verdict_tag(verdict, candidate.digest, read_slo().limits.digest)
        client.set_tag(run.info.run_id, "verdict", tag)


def crown(run: Run, *, force: bool = False, reason: str = "") -> int:
    return promote(run.info.run_id, as_champion=True, is_forced=force, reason=reason)


def champion() -> str | None:
    return version_of(NAME, "champion")


def events(client: MlflowClient) -> list[Event]:
    return events_of(versions_of(client, NAME))
