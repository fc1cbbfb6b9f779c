"""What a person does who releases a model, and what the store then says."""

import shutil

from factories import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run
from registered import LABELS

from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.registry import version_of
from gradtrail.serving.release.history import Event, events_of, versions_of
from gradtrail.serving.release.promote import promote
from gradtrail.serving.slo import read_slo

RIGHT = LABELS.copy()
NAME = "digits"


def judge(client: MlflowClient, run: Run, verdict: str) -> None:
    shutil.copy(ROOT / "slo.yaml", ".")
    candidate = find_candidate(run.info.run_id, client)
    tags = {"verdict": verdict, "verdict_export": candidate.digest, "verdict_limits": read_slo().limits.digest}
    for key, value in tags.items():
        if verdict:
            client.set_tag(run.info.run_id, key, value)


def crown(run: Run, *, force: bool = False, reason: str = "") -> int:
    return promote(run.info.run_id, as_champion=True, is_forced=force, reason=reason)


def champion() -> str | None:
    return version_of(NAME, "champion")


def events(client: MlflowClient) -> list[Event]:
    return events_of(versions_of(client, NAME))
