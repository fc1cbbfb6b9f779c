"""`gradtrail gate`: compare the static costs of the configured functions with the accepted ones in the repository.

Only `params.yaml` is read: the functions of `train`, `evaluate` and `gradients` are compiled for the shapes of MNIST;
nothing runs. Costs depend on the versions of jax and jaxlib and on the architecture, such as x86_64, but not on the
processor: XLA counts them before it selects instructions. Out of scope: compilations that calls cause, of which the
stages warn.
"""

import dataclasses
import itertools
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib

from gradtrail.core.evaluate import EvaluateConfig
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.inference import compile_predict_within
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import PARAMS, flatten, load_section
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable

Costs = dict[str, dict[str, int]]  # function → metric → value

ACCEPTED = Path("benchmarks/accepted_costs.json")
TOLERANCES = {  # metric → largest relative difference from the accepted value, in either direction
    "flops": 0.01,
    "transcendentals": 0.01,
    "bytes_accessed": 0.02,
    "total_bytes": 0.01,
    "hlo_instructions": 0.05,
    "jaxpr_equations": 0.0,
    "argument_bytes": 0.0,
    "output_bytes": 0.0,
    "donated_buffers": 0.0,
    "float64_instructions": 0.0,
    "compilations": 0.0,
}
# Metrics that are equal on all platforms for all versions; and those that are for the same versions of jax and jaxlib
PORTABLE_METRICS = ("argument_bytes", "output_bytes", "float64_instructions")
SAME_VERSION_METRICS = (*PORTABLE_METRICS, "jaxpr_equations", "donated_buffers", "compilations")

_IMAGE_SHAPE, _NUM_CLASSES, _SIZES = (28, 28), 10, (55_000, 5_000)  # of MNIST's training and validation split


def run_gate(*, accept: bool) -> int:
    """Compare the current costs with the accepted ones, or accept them; return the exit status, 1 for a change."""
    if not accept and not ACCEPTED.is_file():
        raise UserError(f"{ACCEPTED}: no such file; `gradtrail gate --accept` writes it")
    console, current = stdout_console(), measure()
    if accept:
        write_json(ACCEPTED, current)
        console.print(f"{ACCEPTED}: {len(current['costs'])} functions accepted")
        return 0
    accepted = json.loads(ACCEPTED.read_text(encoding="utf-8"))

    # Only what is comparable: between machines and versions some metrics differ for the same program.
    before, after = accepted["machine"], current["machine"]
    metrics: Iterable[str] = TOLERANCES
    if before != after:
        is_same_version = all(before[name] == after[name] for name in ("jax", "jaxlib"))
        metrics = SAME_VERSION_METRICS if is_same_version else PORTABLE_METRICS
        then, now = (", ".join(f"{key} {value}" for key, value in machine.items()) for machine in (before, after))
        console.print(f"accepted on {then}; this machine is {now}: comparing only {', '.join(sorted(metrics))}")
    old, new = flatten(accepted["params"]), flatten(current["params"])
    if changed := [key for key in old | new if old.get(key) != new.get(key)]:
        console.print(f"params differ from the accepted ones: {', '.join(changed)}")

    changes = find_changes(accepted["costs"], current["costs"], metrics)
    if not changes:
        console.print(f"gate: the costs of {len(current['costs'])} functions are those accepted")
        return 0
    right = ("accepted", "current", "ratio", "tolerance")
    console.print(TextTable("costs beyond their tolerance", changes, right=right))
    console.print("`gradtrail gate --accept` accepts the current costs; commit the file and explain why they changed")
    return 1


def find_changes(accepted: Costs, current: Costs, metrics: Iterable[str]) -> list[dict[str, str]]:
    """Return a row of a table for each metric that differs by more than its tolerance; a missing function costs 0."""
    rows = []
    for function, metric in itertools.product(accepted | current, metrics):
        before, after = (costs.get(function, {}).get(metric, 0) for costs in (accepted, current))
        if abs(after - before) > TOLERANCES[metric] * before:
            rows.append(
                {
                    "function": function,
                    "metric": metric,
                    "accepted": f"{before:,}",
                    "current": f"{after:,}",
                    "ratio": f"{after / before:.3f}" if before else "new",
                    "tolerance": f"{TOLERANCES[metric]:.0%}",
                }
            )
    return rows


def measure() -> dict[str, Any]:
    """Return the costs of `train`, `evaluate` and `gradients`, with the machine and params that determine them."""
    config, runtime = load_section("train", TrainConfig), load_section("runtime", RuntimeConfig)
    set_up_jax(load_section("environment", EnvironmentConfig), dataclasses.replace(runtime, disable_jit=False))
    set_cpu_devices(config.shards)
    evaluate = load_section("evaluate", EvaluateConfig)
    device = jax.local_devices()[0]
    machine = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "architecture": platform.machine() if device.platform == "cpu" else device.device_kind,
        "devices": str(jax.local_device_count()),
    }
    model = Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES), remat=config.remat)
    compilers = {stage: Compiler(lambda: 0.0) for stage in ("train", "evaluate", "gradients")}
    noise = placeholder_noise(config.privacy)
    training = loop.TrainingFunctions(config, model, _SIZES[0], jax.local_devices(), noise).compile(compilers["train"])
    loop.compile_validate(model, _SIZES[1], training.mesh, compiler=compilers["train"])
    compile_predict_within(model, evaluate.batch_size, compiler=compilers["evaluate"])
    compile_passes(model, config.loss, compiler=compilers["gradients"])
    costs = {
        f"{stage}/{name}": metrics
        for stage, compiler in compilers.items()
        for name, metrics in costs_of(compiler).items()
    }
    params = read_yaml(PARAMS)
    sections = {name: params[name] for name in ("train", "evaluate", "gradients", "environment")}
    return {"machine": machine, "params": sections, "costs": costs}


def costs_of(compiler: Compiler) -> dict[str, dict[str, int]]:
    """Return the compared metrics of each compiled function."""
    return {
        name: {
            metric: compiler.compilations[name] if metric == "compilations" else getattr(function.cost, metric)
            for metric in TOLERANCES
        }
        for name, function in compiler.functions.items()
    }
