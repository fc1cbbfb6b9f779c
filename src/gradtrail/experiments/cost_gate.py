"""`gradtrail gate`: compare the static costs of the configured functions with the accepted ones in the repository.

Only `params.yaml` is read: the functions are compiled for the shapes of MNIST. To count compilations that calls cause,
each stage's work runs on a few images. Costs depend on the versions of jax and jaxlib and on the architecture, such as
x86_64, but not on the processor: XLA counts them before it selects instructions.
"""

import contextlib
import dataclasses
import io
import json
import platform
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from rich.table import Table

from gradtrail.core import batching
from gradtrail.core.data import Split
from gradtrail.core.evaluate import EvaluateConfig, evaluate_logits, fit_temperature
from gradtrail.core.gradients import analysis, passes
from gradtrail.core.gradients.analysis import GradientsConfig
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import HostParams, Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction, Compiler
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import PARAMS, flatten, load_section
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.training import Training
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.live import LiveRun
from gradtrail.tracking.state import WorkingState
from gradtrail.tracking.training_log import TrainingLog

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

_IMAGE_SHAPE, _NUM_CLASSES, _NUM_EXAMPLES = (28, 28), 10, 55_000  # MNIST's training split
_STEPS, _STEPS_PER_CALL = 4, 3  # short epochs, whose last step has a smaller batch and is a separate chunk
_FEW = 4  # number of images


def run_gate(*, accept: bool) -> int:
    """Compare the current costs with the accepted ones, or accept them; return the exit status, 1 for a change."""
    console, current = stdout_console(), measure()
    if accept:
        write_json(ACCEPTED, current)
        console.print(f"{ACCEPTED}: {len(current['costs'])} functions accepted")
        return 0
    if not ACCEPTED.is_file():
        raise UserError(f"{ACCEPTED}: no such file; `gradtrail gate --accept` writes it")
    accepted = json.loads(ACCEPTED.read_text(encoding="utf-8"))

    # Only what is comparable: between machines and versions some metrics differ for the same program.
    before, after = accepted["machine"], current["machine"]
    metrics: Collection[str] = TOLERANCES
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
    console.print(as_table(changes))
    console.print("`gradtrail gate --accept` accepts the current costs; commit the file and explain why they changed")
    return 1


Change = tuple[str, str, int | None, int | None]  # function, metric, accepted and current value; None if there is none


def find_changes(accepted: Costs, current: Costs, metrics: Collection[str]) -> list[Change]:
    """Return the metrics that differ by more than their tolerance, in the order of the functions."""
    changes: list[Change] = []
    for function in accepted | current:
        for metric in TOLERANCES:
            before, after = (costs.get(function, {}).get(metric) for costs in (accepted, current))
            if before is None or after is None:
                differs = before is not after
            else:
                differs = abs(after - before) > TOLERANCES[metric] * abs(before)
            if differs and metric in metrics:
                changes.append((function, metric, before, after))
    return changes


def as_table(changes: Iterable[Change]) -> Table:
    """Return a table of the changes."""
    rows = [
        {
            "function": function,
            "metric": metric,
            "accepted": "-" if before is None else f"{before:,}",
            "current": "-" if after is None else f"{after:,}",
            "ratio": f"{after / before:.3f}" if before and after is not None else "-",
            "tolerance": f"{TOLERANCES[metric]:.0%}",
        }
        for function, metric, before, after in changes
    ]
    return table("costs beyond their tolerance", rows, right=("accepted", "current", "ratio", "tolerance"))


def measure() -> dict[str, Any]:
    """Return the costs of `train`, `evaluate` and `gradients`, with the machine and params that determine them."""
    config, runtime = load_section("train", TrainConfig), load_section("runtime", RuntimeConfig)
    runtime = dataclasses.replace(runtime, debug_nans=False, disable_jit=False)
    set_up_jax(load_section("environment", EnvironmentConfig), runtime)
    set_cpu_devices(config.shards)
    evaluate, gradients = load_section("evaluate", EvaluateConfig), load_section("gradients", GradientsConfig)
    costs = _costs_of_stage("train", lambda compiler: _train(config, runtime, compiler))
    costs |= _costs_of_stage("evaluate", lambda compiler: _evaluate(config, evaluate, compiler))
    costs |= _costs_of_stage("gradients", lambda compiler: _analyze(config, gradients, compiler))
    device = jax.local_devices()[0]
    machine = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "architecture": platform.machine() if device.platform == "cpu" else device.device_kind,
        "devices": str(jax.local_device_count()),
    }
    params = read_yaml(PARAMS)
    sections = {name: params[name] for name in ("train", "evaluate", "gradients", "environment")}
    return {"machine": machine, "params": sections, "costs": costs}


def _costs_of_stage(stage: str, work: Callable[[Compiler], None]) -> Costs:
    """Return the costs of the functions that a stage's work compiles, and the number of compilations by its calls."""
    with CompileLog() as log:
        compiler = Compiler(lambda: 0.0, log=log)
        work(compiler)
    for line in compiler.warnings:
        print(f"{stage}: warning: {line}", file=sys.stderr)
    costs = {f"{stage}/{name}": metrics for name, metrics in costs_of(compiler).items()}
    return costs | {f"{stage}/unplanned": {"compilations": len(log.unplanned)}}


def costs_of(compiler: Compiler) -> Costs:
    """Return the compared metrics of each compiled function."""
    return {
        name: {
            metric: compiler.compilations[name] if metric == "compilations" else getattr(function.cost, metric)
            for metric in TOLERANCES
        }
        for name, function in compiler.functions.items()
    }


def _train(config: TrainConfig, runtime: RuntimeConfig, compiler: Compiler) -> None:
    """Compile the functions, and run two short epochs as the stage does, with its work after chunks and epochs."""
    model = Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES), remat=config.remat)
    noise = placeholder_noise(config.privacy)
    program = loop.make_program(config, model, _NUM_EXAMPLES, jax.local_devices(), noise).compile(compiler)
    predict = inference.compile_predict_within(model, compiler=compiler)
    steps = min(_STEPS, program.steps_per_epoch)

    def short_order(*arguments: Any) -> np.ndarray:
        order = np.full_like(program.order(*arguments), batching.PADDING)
        rows = range((steps - 1) * order.shape[1] + 1)
        np.put(order, rows, rows)
        return order

    config = dataclasses.replace(config, epochs=2, members=1, patience=None)
    training = Training(
        config=config,
        runtime=runtime,
        info=DatasetInfo(name="", digest="", image_shape=_IMAGE_SHAPE, num_classes=_NUM_CLASSES, examples={}, files={}),
        train=_examples(_NUM_EXAMPLES),
        validation=_examples(_FEW),
        devices=jax.local_devices(),
        steps_per_call=_STEPS_PER_CALL,
    )
    order = CompiledFunction(name="order", call=short_order, cost=NO_COST, times=NO_TIMES)
    training.program = dataclasses.replace(program, config=config, steps_per_epoch=steps, order=order)
    training.predict = predict
    log = TrainingLog(LiveRun(WorkingState("train"), None), training)
    with contextlib.redirect_stderr(io.StringIO()):  # the progress of the epochs
        training.train_network(config.seeds_of(config.seed), Checkpoints(None, 0.0), log)


def _evaluate(config: TrainConfig, evaluate: EvaluateConfig, compiler: Compiler) -> None:
    model, split = Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES)), _examples(_FEW)
    predict = inference.compile_predict_within(model, evaluate.batch_size, compiler=compiler)
    logits = predict(_some_params(model), split.images, split.labels)["logits"]
    temperature, bins = fit_temperature(logits, split.labels), evaluate.calibration_bins
    evaluate_logits(logits, split.labels, temperature=temperature, calibration_bins=bins)


def _analyze(config: TrainConfig, gradients: GradientsConfig, compiler: Compiler) -> None:
    model = Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES))
    compiled = passes.compile_passes(model, config.label_smoothing, compiler=compiler)
    splits = {"train": _examples(_FEW), "test": _examples(_FEW)}
    trajectory = analysis.Trajectory(
        params={0: _some_params(model), 1: _some_params(model)},
        scored=1,
        batch_size=_FEW,
    )
    analysis.analyze(compiled, trajectory, splits, gradients, _NUM_CLASSES)


def _examples(count: int) -> Split:
    """Return black images of two classes."""
    ids = np.arange(count, dtype=np.int32)
    images = np.zeros((count, *_IMAGE_SHAPE), np.uint8)
    labels = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), ids % 2)
    return Split(images=images, example_id=ids, **labels)


def _some_params(model: Model) -> HostParams:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype), model.abstract_params())
