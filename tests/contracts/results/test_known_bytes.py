"""Every x86-64 with AVX2 and FMA computes the same bytes: each machine that runs this is one more proof."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT, environment

from gradtrail.stages.common.environment import has_common_bytes
from gradtrail.tracking.environment import machine_key

KNOWN = Path(__file__).with_name("known_bytes.json")


ONE_CORE = ("taskset", "-c", "0")


@pytest.mark.slow
@pytest.mark.parametrize("under", [(), pytest.param(ONE_CORE, marks=pytest.mark.nightly)], ids=["", "one core"])
@pytest.mark.skipif(not has_common_bytes(), reason="no AVX2 or no FMA: this processor adds in another order")
def test_this_processor_computes_the_known_bytes(under: tuple[str, ...]) -> None:
    command = [*under, sys.executable, "tests/support_code/known_bytes.py"]
    process = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True, timeout=600)
    found, known = json.loads(process.stdout), json.loads(KNOWN.read_text())
    assert found["versions"] == known["versions"], f"write {KNOWN.name} again, as known_bytes.py says"
    assert {*found["digests"]} == {*known["digests"]}
    for name, arrays in known["digests"].items():
        different = [path for path in arrays if found["digests"][name].get(path) != arrays[path]]
        assert not different, f"{machine_key()} computes another {different[0]} of {name!r} than {known['processors']}"
