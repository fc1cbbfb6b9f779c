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


def test_machine_key_distinguishes_processors_and_gpus(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_key() == "AuthenticAMD-25-1-avx2"
    cpuinfo.write_text(MILAN.replace("avx2", "avx2 avx512f"))
    assert machine_key() == "AuthenticAMD-25-1-avx512f"
    monkeypatch.setattr(module, "_accelerators", lambda: ["NVIDIA H100"])
    assert machine_key() == "AuthenticAMD-25-1-avx512f-NVIDIA-H100"


def test_environment_has_versions_and_switches_as_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("UNRELATED", "1")
    description = json.loads(json.dumps(environment()))
    assert description["packages"]["jax"] == version("jax")
    assert description["switches"]["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert "UNRELATED" not in description["switches"]
    assert environment_tags() == {"machine": description["machine"], "jax": version("jax")}


@pytest.mark.parametrize(
    ("flags", "features"),
    [
        (
            "fpu smep sse2 avx512f avx512_bf16 amx_tile amx_bf16 avx_vnni",
            ["amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx_vnni"],
        ),
        ("fp asimd asimddp crc32 sve2 bf16", ["asimd", "asimddp", "bf16", "sve2"]),
        ("", []),
    ],
)
def test_environment_has_the_features_that_change_compiled_code(flags: str, features: list[str], cpuinfo: Path) -> None:
    cpuinfo.write_text(MILAN.replace("fpu sse2 avx2 fma", flags))
    assert environment()["processor"]["features"] == features


def test_the_driver_of_a_gpu_is_that_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)\n"
    )
    monkeypatch.setattr(module, "Path", lambda _: driver)
    assert module._driver() == {"nvidia": "580.95.05"}
    driver.unlink()
    assert module._driver() == {}


def test_limit_of_the_control_group_is_given_in_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(module, "Path", lambda _: limit)
    assert "cores_quota" not in module._cores()
    limit.write_text("max 100000\n")
    assert "cores_quota" not in module._cores()
    limit.write_text("150000 100000\n")
    assert module._cores()["cores_quota"] == 1.5
