"""The split of ids into those of the challenger and the others."""

import math
import os
import subprocess
import sys

import pytest
from factories import ROOT

from gradtrail.serving.rollout.split import in_canary, position

IDS = [f"client-{number}" for number in range(20_000)]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_ids_is_the_share_asked_for(share: float) -> None:
    got = sum(in_canary(each, share) for each in IDS) / len(IDS)
    assert abs(got - share) < 4 * math.sqrt(share * (1 - share) / len(IDS))


def test_nobody_at_nothing_and_everybody_at_all() -> None:
    assert not any(in_canary(each, 0.0) for each in IDS)
    assert all(in_canary(each, 1.0) for each in IDS)


def test_whoever_is_in_a_share_stays_in_a_larger_one() -> None:
    small, large = ({each for each in IDS if in_canary(each, share)} for share in (0.1, 0.25))
    assert small
    assert small < large


def test_another_salt_splits_independently() -> None:
    first = {each for each in IDS if in_canary(each, 0.5)}
    second = {each for each in IDS if in_canary(each, 0.5, salt="compare")}
    assert abs(len(first & second) / len(IDS) - 0.25) < 0.02


def test_a_client_stays_in_another_process_with_another_hash_seed() -> None:
    code = "from gradtrail.serving.rollout.split import position; print(position('client-1'), position('\\xe4\\udcff'))"
    odd = position("ä\udcff")
    wanted = f"{position('client-1')} {odd}"
    for seed in ("1", "2"):
        # Not `sys.path`: MLflow leaves the code of models there that other tests have loaded.
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split("\n")[-2] == wanted, ran.stderr
    assert position("client-1") == pytest.approx(0.78373126)
