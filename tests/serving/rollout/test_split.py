"""The split of ids between challenger and primary."""

import math
import os
import subprocess
import sys

import pytest
from factories import ROOT

from gradtrail.serving.rollout.split import is_in_canary, position

IDS = [f"client-{number}" for number in range(20_000)]


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_share_of_ids_is_the_configured_share(share: float) -> None:
    observed = sum(is_in_canary(name, share) for name in IDS) / len(IDS)
    assert abs(observed - share) < 4 * math.sqrt(share * (1 - share) / len(IDS))


def test_larger_share_contains_a_smaller_one() -> None:
    none, small, large, everyone = (
        {name for name in IDS if is_in_canary(name, share)} for share in (0.0, 0.1, 0.25, 1.0)
    )
    assert none < small < large < everyone
    assert (len(none), len(everyone)) == (0, len(IDS))


def test_salts_split_independently() -> None:
    first = {name for name in IDS if is_in_canary(name, 0.5)}
    second = {name for name in IDS if is_in_canary(name, 0.5, salt="compare")}
    assert abs(len(first & second) / len(IDS) - 0.25) < 0.02


def test_position_does_not_depend_on_the_process() -> None:
    code = "from gradtrail.serving.rollout.split import position; print(position('client-1'), position('\\xe4\\udcff'))"
    odd = position("ä\udcff")
    expected = f"{position('client-1')} {odd}"
    for seed in ("1", "2"):
        # Not `sys.path`: MLflow leaves the code of models there that other tests have loaded.
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split("\n")[-2] == expected, ran.stderr
    assert position("client-1") == pytest.approx(0.78373126)
