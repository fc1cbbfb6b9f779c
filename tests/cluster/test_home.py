"""Fetching results: an error of git, DVC or a store is a warning of one line, a bug of this project is raised."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository, run_git
from dvc.exceptions import DvcException

from gradtrail.cluster import home
from gradtrail.cluster.home import fetch_experiments
from gradtrail.cluster.places import Places
from gradtrail.cluster.refs import experiment_ref


@pytest.fixture
def places(shared: SharedRepository, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(shared.clone)
    run_git(shared.bare, "update-ref", experiment_ref(shared.commit, "gradtrail-1"), shared.commit)
    return Places(commit=shared.commit, remote="origin", git_url=shared.url, tracking_uri="sqlite:///x.db", cache=None)


def fail_with(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise fault

    monkeypatch.setattr(home, "_fetch_listings", fail)


@pytest.mark.parametrize(
    "fault",
    [
        OSError("denied for very-secret\nagain"),
        DvcException("denied for very-secret\nagain"),
        type("ClientError", (Exception,), {"__module__": "botocore.exceptions"})("denied for very-secret\nagain"),
    ],
)
def test_failing_remote_is_a_warning_of_one_line(
    places: Places, fault: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    fail_with(fault, monkeypatch)
    fetch_experiments(places, ["gradtrail-1"])
    warning = "warning: not all results are fetched yet (denied for *** again); run the same command again\n"
    assert capsys.readouterr().err == warning
    assert run_git(Path(), "rev-parse", experiment_ref(places.commit, "gradtrail-1")) == places.commit


def test_bug_is_raised(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(TypeError("a bug"), monkeypatch)
    with pytest.raises(TypeError):
        fetch_experiments(places, ["gradtrail-1"])
