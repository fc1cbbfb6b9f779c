"""No variable changes a switch of JAX in a stage; one that cannot be removed is refused in one line."""

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT
from requests.utils import get_environ_proxies

from gradtrail.stages.common import environment as module
from gradtrail.stages.common.environment import (
    KEPT,
    EnvironmentConfig,
    adapt_variables,
    cpuinfo,
    has_common_bytes,
    processor_digest,
    refuse_variables,
    require_jax,
)
from gradtrail.stages.common.versions import require_recorded_versions, write_installed_versions
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

CONFIG = EnvironmentConfig(cpu_threads=3, xla_flags=("--xla_cpu_enable_fast_math=true",), processor="any")
SCRIPT = """
import json, os, sys
from gradtrail.stages.common.environment import EnvironmentConfig, adapt_variables, set_cpu_devices, set_up_jax
assert not {"jax", "numpy"} & sys.modules.keys()
adapt_variables()
import jax, numpy
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.environment import RuntimeConfig
as_started = {name: str(value) for name, value in jax.config.values.items()}
config = EnvironmentConfig(cpu_threads=3, xla_flags=("--xla_cpu_enable_fast_math=true",), processor=sys.argv[1])
for _ in range(2):
    set_up_jax(config, load_section("runtime", RuntimeConfig))
set_cpu_devices(2)
switches = {name: str(value) for name, value in jax.config.values.items()}
names = ("XLA_FLAGS", "PJRT_NPROC", "XLA_PYTHON_CLIENT_PREALLOCATE", "ONEDNN_MAX_CPU_ISA")
variables = {name: os.environ[name] for name in names if name in os.environ}
core = numpy._core._multiarray_umath
functions = [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]
print(json.dumps([as_started, switches, variables, len(jax.devices()), functions]))
"""
OTHER = {  # values of switches that are not logical
    "JAX_COMPILATION_CACHE_DIR": "/somewhere",
    "JAX_DEFAULT_DEVICE": "cpu",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0",
    "JAX_EXPLICIT_X64_DTYPES": "allow",
    "JAX_LEGACY_PRNG_KEY": "error",
    "JAX_MEMORY_FITTING_EFFORT": "-1.0",
    "JAX_MEMORY_FITTING_LEVEL": "O0",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_OPTIMIZATION_LEVEL": "O0",
    "JAX_RANDOM_SEED_OFFSET": "7",
}


def set_up(processor: str, **env: str) -> list[Any]:
    """The switches of JAX in a new process, before and after it is set up; some variables; the number of devices.

    Also NumPy's functions for other instructions than the oldest ones.
    """
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"} | env
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, processor]
    process = subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE)
    return list(json.loads(process.stdout))


def test_environment_does_not_change_switches_of_stage() -> None:
    """The switches are the same in a native stage, and in another whose environment has other values of all of them."""
    as_started, expected, native, _, functions = set_up("native", XLA_FLAGS="", ONEDNN_MAX_CPU_ISA="SSE41")
    assert native["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true --xla_gpu_deterministic_ops=true"
    assert (native["PJRT_NPROC"], native["XLA_PYTHON_CLIENT_PREALLOCATE"]) == ("3", "false")
    assert "ONEDNN_MAX_CPU_ISA" not in native
    changed = {
        name.upper(): OTHER.get(name.upper(), str(value != "True"))
        for name, value in as_started.items()
        if name.startswith("jax_")
        and name.upper() not in KEPT
        and (value in ("True", "False") or name.upper() in OTHER)
    }
    assert len(changed) > 30, "else it shows nothing"
    flags = "--xla_gpu_deterministic_ops=false --xla_force_host_platform_device_count=4 --xla_dump_to=x"
    more = {"JAX_NUM_CPU_DEVICES": "5", "PJRT_NPROC": "7", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    removed, switches, variables, devices, _ = set_up("any", **changed, **more, XLA_FLAGS=flags)
    assert (removed, switches, devices) == (as_started, expected, 2)
    assert variables == {
        "XLA_FLAGS": " ".join(["--xla_dump_to=x", *CONFIG.all_flags, "--xla_gpu_deterministic_ops=true"]),
        "PJRT_NPROC": "3",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    if platform.machine() == "x86_64":
        assert functions == ["X86_V3"] * has_common_bytes(), "native stages too"


def test_processors_with_avx2_and_fma_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    native = dataclasses.replace(CONFIG, processor="native")
    monkeypatch.setattr(module, "cpuinfo", lambda: "flags : fma avx2\n\nflags : fma")
    assert module.kind_of_processor(CONFIG) == "x86-64-v3" != module.kind_of_processor(native)
    for flags in ("avx2", "fma", "", "avx512f"):
        monkeypatch.setattr(module, "cpuinfo", lambda flags=flags: f"flags : {flags}\n")
        assert module.kind_of_processor(CONFIG) == module.kind_of_processor(native)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.cpu.hwcaps=-AVX2"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
        ("XLA_FLAGS", "flags.txt"),
    ],
)
def test_variable_that_may_change_results_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    refuse_variables(CONFIG)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^{name} (is set to|has) '[^\n]*{value.split(':')[-1]}'[^\n]*unset it"):
        refuse_variables(CONFIG)


def test_other_variables_are_removed_or_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = {"JAX_NOT_YET_KNOWN", "XLA_NOT_YET_KNOWN", "CHECK_VMA", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE"}
    for name in (*removed, *KEPT, "JAXTYPING_DISABLE", "NPY_DISABLE_CPU_FEATURES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_dump_to=x", *CONFIG.all_flags]))
    adapt_variables()
    refuse_variables(CONFIG)
    assert not removed & os.environ.keys()
    assert os.environ["NPY_DISABLE_CPU_FEATURES"] != "1"
    assert {*KEPT, "JAXTYPING_DISABLE"} <= os.environ.keys()


@pytest.mark.parametrize("hosts", ["", "example.com", "localhost,.example.com", "*"])
def test_no_request_to_this_machine_goes_to_a_proxy(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = "http://proxy.example.com:3128"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, hosts)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    adapt_variables()
    for address in ("http://127.0.0.1:5000", "http://localhost:8265/api"):
        assert get_environ_proxies(address) == {}, "as the clients of MLflow and Ray ask"
        assert urllib.request.proxy_bypass(address.split("/")[2])
    assert (get_environ_proxies("http://mirror.org") == {}) == (hosts == "*")
    assert (get_environ_proxies("http://www.example.com") == {}) == (hosts != "")


def test_variables_and_flags_are_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpuu")
    with pytest.raises(UserError, match=r"^JAX does not start with JAX_PLATFORMS=cpuu: .*Unable to initialize.*$"):
        require_jax()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    key = r"\(with environment\.xla_flags of params\.yaml\)"
    with pytest.raises(UserError, match=rf"^JAX [^\n]* {key}: Unknown flag in XLA_FLAGS: --xla_cpu_typo=1$"):
        require_jax(["--xla_cpu_typo=1"])
    require_jax(CONFIG.xla_flags)
    monkeypatch.setattr(subprocess, "run", None)
    require_jax(CONFIG.xla_flags)


def test_digest_distinguishes_arm_processors_with_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for part, frequency in (("0xd0c", 1), ("0xd0c", 2), ("0xd40", 1)):
        lines = f"processor\t: 0\nBogoMIPS\t: {frequency}\nFeatures\t: fp asimd\nCPU part\t: {part}\n"
        monkeypatch.setattr(module, "cpuinfo", lambda lines=lines: lines)
        digests.append(processor_digest())
    assert digests[0] == digests[1] != digests[2]


def test_macos_names_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `/proc/cpuinfo`, but `sysctl`."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: Path("/nowhere").read_bytes())
    monkeypatch.setattr(subprocess, "check_output", lambda command, **_: f"{command[0]}: Apple M1\n")
    assert cpuinfo() == "model name: sysctl: Apple M1\n"


def test_recorded_versions_are_locked() -> None:
    pins = (ROOT / "locks/base.lock").read_text().splitlines()
    for package, recorded in read_yaml(ROOT / "pipeline/versions.yaml").items():
        assert any(re.match(rf"{package}=={re.escape(recorded)}(\s|;|$)", line) for line in pins), package


def test_installed_versions_are_recorded_and_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipeline").mkdir()
    Path("pipeline/versions.yaml").write_text('numpy: "1.0"\njax: "0.1"\n')
    require_recorded_versions(())
    with pytest.raises(UserError, match=rf"it has numpy 1\.0, but {re.escape(version('numpy'))} is installed"):
        require_recorded_versions(("numpy",))
    with pytest.raises(UserError, match="it has flax None"):
        require_recorded_versions(("flax",))
    assert write_installed_versions() == {"numpy": version("numpy"), "jax": version("jax")}
    require_recorded_versions(("numpy", "jax"))
    assert Path("pipeline/versions.yaml").read_text().startswith("# ")
