"""A run says what computed it: the kind of machine, the packages, the switches."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from gradtrail.tracking.lineage import environment as module
from gradtrail.tracking.lineage.environment import environment, environment_tags, machine_key

MILAN = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 fma

processor\t: 1
vendor_id\t: other
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of /proc/cpuinfo, and no accelerator."""
    path = tmp_path / "cpuinfo"
    path.write_text(MILAN)
    monkeypatch.setattr(module, "Path", lambda _: path)
    monkeypatch.setattr(module, "_accelerators", list)
    return path


def test_the_key_tells_kinds_of_processors_apart(cpuinfo: Path) -> None:
    assert machine_key() == "AuthenticAMD-25-1-avx2"
    cpuinfo.write_text(MILAN.replace("avx2", "avx2 avx512f"))
    assert machine_key() == "AuthenticAMD-25-1-avx512f"


def test_a_system_without_that_file_has_a_key_too(cpuinfo: Path) -> None:
    cpuinfo.unlink()
    assert machine_key() == module.platform.machine()


def test_a_gpu_is_part_of_the_key(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_accelerators", lambda: ["NVIDIA H100"])
    assert machine_key() == "AuthenticAMD-25-1-avx2-NVIDIA-H100"


def test_it_names_versions_and_switches_and_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("UNRELATED", "1")
    found = json.loads(json.dumps(environment()))
    assert found["packages"]["jax"] == version("jax")
    assert found["switches"]["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert "UNRELATED" not in found["switches"]
    assert environment_tags() == {"machine": found["machine"], "jax": version("jax")}
