"""Runs a script with several devices: XLA splits a processor into devices only when a process starts."""

import os
import subprocess
import sys

from factories import ROOT


def run_on_devices(script: str, count: int) -> str:
    """Run Python code in a process with so many CPU devices, compiled fast; return what it prints."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
