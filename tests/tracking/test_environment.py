"""A run says what computed it: the kind of machine, the packages, the switches."""

import json
import platform
from importlib.metadata import version

import pytest

from gradtrail.tracking import environment as module
from gradtrail.tracking.environment import bytes_key, environment, machine_key

MILAN = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 fma

processor\t: 1
vendor_id\t: other
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd crc32
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The system's files, path → text; there is no accelerator."""
    texts = {"/proc/cpuinfo": MILAN}
    monkeypatch.setattr(module, "_text", lambda path: texts.get(path, ""))
    monkeypatch.setattr(module, "cpuinfo", lambda: texts.get("/proc/cpuinfo", ""))
    monkeypatch.setattr(module, "_accelerators", list)
    return texts


def test_machine_key_distinguishes_processors_and_gpus(texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_key() == "AuthenticAMD-25-1-avx2"
    texts["/proc/cpuinfo"] = MILAN.replace("avx2", "avx2 avx512f")
    assert machine_key() == "AuthenticAMD-25-1-avx512f"
    monkeypatch.setattr(module, "_accelerators", lambda: ["NVIDIA H100"])
    assert machine_key() == "AuthenticAMD-25-1-avx512f-NVIDIA-H100"


def test_the_bytes_are_those_of_all_processors_or_of_the_machine(
    texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kind_of_processor", lambda _: "x86-64-v3")
    assert bytes_key() == "x86-64-v3"
    monkeypatch.setattr(module, "_accelerators", lambda: ["NVIDIA H100"])
    assert bytes_key() == machine_key()
    monkeypatch.setattr(module, "_accelerators", list)
    monkeypatch.setattr(module, "kind_of_processor", lambda _: "a digest")
    assert bytes_key() == machine_key()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (GRAVITON, "0x41-0xd0c-asimd"),
        (GRAVITON.replace("0xd0c", "0xd40"), "0x41-0xd40-asimd"),
        ("model name: Apple M2 Pro\n", "Apple-M2-Pro"),
        ("", platform.machine()),
    ],
)
def test_machine_key_distinguishes_arm_processors(text: str, key: str, texts: dict[str, str]) -> None:
    texts["/proc/cpuinfo"] = text
    assert machine_key() == key


def test_environment_has_versions_and_switches_as_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("UNRELATED", "1")
    description = json.loads(json.dumps(environment()))
    assert description["packages"]["jax"] == version("jax")
    assert description["switches"]["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert "UNRELATED" not in description["switches"]


def test_environment_has_what_changes_compiled_code_and_its_speed(texts: dict[str, str]) -> None:
    flags = "fpu smep avx512f amx_bf16 asimd crc32 bf16"
    texts["/proc/cpuinfo"] = MILAN.replace("fpu sse2 avx2 fma", flags)
    texts["/sys/fs/cgroup/cpu.max"] = "150000 100000\n"
    texts["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA Open Kernel Module for x86_64  580.95.05\n"
    description = environment()
    assert description["processor"]["features"] == ["amx_bf16", "asimd", "avx512f", "bf16"]
    assert description["processor"]["cores_quota"] == 1.5
    assert description["driver"] == "580.95.05"
    texts["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    del texts["/proc/cpuinfo"], texts["/proc/driver/nvidia/version"]
    description = environment()
    assert description["processor"]["features"] == []
    assert "cores_quota" not in description["processor"]
    assert description["driver"] == ""
