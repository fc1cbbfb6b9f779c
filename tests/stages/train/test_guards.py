"""Debug switches of the steps: JAX's guards of transfers and threads see a planted fault, and nothing else."""

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from factories import ROOT

from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.train.training import guarded

RUNTIME = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
VALUES = np.ones(3, np.float32)


def test_implicit_transfer_in_a_step_is_an_error_and_one_between_steps_is_none() -> None:
    double = jax.jit(lambda values: values * 2)

    def chunks(arguments: Any) -> Iterator[Any]:
        yield from (double(argument) for argument in arguments)

    runtime = dataclasses.replace(RUNTIME, transfer_guard="disallow")
    for result in guarded(chunks([jax.device_put(VALUES)] * 2), runtime):
        np.testing.assert_array_equal(double(VALUES), result)
    assert len([*guarded(chunks([VALUES] * 2), RUNTIME)]) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        next(guarded(chunks([VALUES]), runtime))


IN_ANOTHER_THREAD = """
import dataclasses, sys, threading
import jax, numpy as np
from test_guards import RUNTIME, guarded
index, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, index, coordinator_bind_address=address)
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
values = jax.make_array_from_callback((2,), rows, lambda index: np.arange(2, dtype=np.float32)[index])
total = jax.jit(lambda values: values.sum()).lower(values).compile()
errors = []

def add():
    try:
        total(values).block_until_ready()
    except Exception as error:
        errors.append(str(error))

def chunks():
    total(values).block_until_ready()
    thread = threading.Thread(target=add)
    thread.start()
    thread.join()
    yield

for on in (False, True):
    list(guarded(chunks(), dataclasses.replace(RUNTIME, thread_guard=on)))
    print(len(errors))
print(errors[0])
"""


@pytest.mark.slow
def test_operation_of_several_processes_in_another_thread_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = (ROOT / "src", ROOT / "tests/support_code", ROOT / "tests/stages/train")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_THREAD, str(index), address], env=env, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    for process in started:
        off, on, error = process.communicate(timeout=100)[0].splitlines()[-3:]
        assert (process.returncode, off, on) == (0, "0", "1")
        assert "multi-process JAX operation was called from thread" in error
