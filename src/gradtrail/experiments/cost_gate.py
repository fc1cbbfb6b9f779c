"""`gradtrail gate`: compare the static costs of the configured functions with the accepted ones in the repository.

Only `params.yaml` is read: the functions are compiled for the shapes of MNIST. To count compilations that calls cause,
each stage's work runs on a few images; training runs two short epochs in the loop of the stage.

XLA counts the costs in its optimized program, before it selects instructions. On a CPU they therefore depend on the
versions of jax and jaxlib and on the architecture, such as x86_64, but not on the processor: with its instruction set
limited to SSE 4.2, AVX or AVX2 (`--xla_cpu_max_isa`) every cost is the same. Not tested: bfloat16 on processors that
multiply it natively (AVX-512 BF16, AMX).
"""

import contextlib
import dataclasses
import functools
import io
import json
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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
from gradtrail.core.gradients.exact import compile_exact, float64_errors, sample_size
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import HostParams, Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import Program
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction, Compiler
from gradtrail.stages.artifacts.data_files import DatasetInfo
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import flatten, load_section, read_yaml
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.training import Training
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.journal import Journal
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.training_log import TrainingLog

Costs = Mapping[str, Mapping[str, int]]  # function → metric → value
Keep = Callable[[str, Compiler], object]

TOLERANCES = {
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
"""Largest relative difference from the accepted value, in either direction, by metric."""

SAME_VERSION_METRICS = frozenset(
    {"jaxpr_equations", "argument_bytes", "output_bytes", "donated_buffers", "float64_instructions", "compilations"}
)
"""Metrics that are equal on all platforms, for the same versions of jax and jaxlib."""

PORTABLE_METRICS = frozenset({"argument_bytes", "output_bytes", "float64_instructions"})
"""Metrics that are equal on all platforms and for all versions."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A metric that differs from the accepted one; None if the function is new or no longer exists."""

    function: str
    metric: str
    before: int | None
    after: int | None

    @property
    def ratio(self) -> float:
        """`after` divided by `before`; NaN if either is missing."""
        return self.after / self.before if self.before and self.after is not None else float("nan")


def _forget(stage: str, compiler: Compiler) -> None: ...


def costs_of(compiler: Compiler) -> dict[str, dict[str, int]]:
    """Return the compared metrics of each compiled function."""
    return {
        name: {
            metric: compiler.compilations[name] if metric == "compilations" else getattr(function.cost, metric)
            for metric in TOLERANCES
        }
        for name, function in compiler.functions.items()
    }


def find_changes(accepted: Costs, current: Costs, metrics: Collection[str]) -> list[Change]:
    """Return the metrics that differ by more than their tolerance, in the order of the functions."""
    return [
        Change(function=function, metric=metric, before=before, after=after)
        for function in dict.fromkeys([*accepted, *current])
        for metric in TOLERANCES
        if metric in metrics
        and _differ(
            metric,
            before := accepted.get(function, {}).get(metric),
            after := current.get(function, {}).get(metric),
        )
    ]


def _differ(metric: str, before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > TOLERANCES[metric] * abs(before)


ACCEPTED = Path("benchmarks/accepted_costs.json")
_SECTIONS = ("train", "evaluate", "gradients", "environment")
_IMAGE_SHAPE, _NUM_CLASSES, _NUM_EXAMPLES = (28, 28), 10, 55_000  # MNIST's training split
_STEPS, _STEPS_PER_CALL = 4, 3  # short epochs, whose last step has a smaller batch and is a separate chunk
_FEW = 4  # number of images


@dataclass(frozen=True, kw_only=True)
class Record:
    """Costs, and the machine and params that determine them."""

    machine: Mapping[str, str]  # `jax`, `jaxlib`, `platform`, `architecture` (a GPU's model) and number of `devices`
    params: Mapping[str, Any]  # sections of `params.yaml` that determine the costs
    costs: Costs


def run_gate(*, accept: bool) -> int:
    """Compare the current costs with the accepted ones, or accept them; return the exit status, 1 for a change."""
    console, current = stdout_console(), measure()
    if accept:
        write_json(ACCEPTED, vars(current))
        console.print(f"{ACCEPTED}: {len(current.costs)} functions accepted")
        return 0
    accepted = read_record(ACCEPTED)
    metrics = _comparable(accepted.machine, current.machine)
    if len(metrics) < len(TOLERANCES):
        machines = f"accepted on {_describe(accepted.machine)}; this machine is {_describe(current.machine)}"
        console.print(f"{machines}: comparing only {', '.join(sorted(metrics))}")
    if changed := _changed_params(accepted.params, current.params):
        console.print(f"params differ from the accepted ones: {', '.join(changed)}")
    changes = find_changes(accepted.costs, current.costs, metrics)
    if not changes:
        console.print(f"gate: the costs of {len(current.costs)} functions are those accepted")
        return 0
    console.print(as_table(changes))
    console.print("`gradtrail gate --accept` accepts the current costs; commit the file and explain why they changed")
    return 1


def measure(keep: Keep = _forget) -> Record:
    """Measure the costs of `train`, `evaluate` and `gradients` as configured; `keep` gets each stage's compiler."""
    config, runtime = load_section("train", TrainConfig), load_section("runtime", RuntimeConfig)
    no_debugging = dataclasses.replace(runtime, debug_nans=False, disable_jit=False)
    set_up_jax(load_section("environment", EnvironmentConfig), no_debugging)
    set_cpu_devices(config.shards)
    costs = measure_training(config, keep)
    costs |= measure_evaluation(config, load_section("evaluate", EvaluateConfig), keep)
    costs |= measure_gradients(config, load_section("gradients", GradientsConfig), keep)
    params = read_yaml(Path("params.yaml"))
    return Record(machine=_machine(), params={name: params[name] for name in _SECTIONS}, costs=costs)


def measure_training(config: TrainConfig, keep: Keep = _forget) -> dict[str, dict[str, int]]:
    """Return the costs of the functions of `train`, as `train/<function>` → metric → value."""
    with CompileLog() as log:
        compiler, model = _compiler(log), Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES), remat=config.remat)
        noise = placeholder_noise(config.privacy)
        program = loop.make_program(config, model, _NUM_EXAMPLES, jax.local_devices(), noise)
        engine = program.compile(compiler)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        _train_shortly(config, engine, predict)
    keep("train", compiler)
    return _costs("train", compiler, log)


def _train_shortly(config: TrainConfig, program: Program, predict: CompiledFunction) -> None:
    """Run two short epochs as the stage does, including its work after chunks and epochs; write nothing."""
    steps = min(_STEPS, program.steps_per_epoch)

    def call_order(*arguments: Any) -> np.ndarray:
        few = np.full_like(program.order(*arguments), batching.PADDING)
        np.put(few, range((steps - 1) * few.shape[1] + 1), range((steps - 1) * few.shape[1] + 1))
        return few

    config = dataclasses.replace(config, epochs=2, members=1, patience=None)
    training = Training(
        config=config,
        runtime=load_section("runtime", RuntimeConfig),
        info=DatasetInfo(name="", digest="", image_shape=_IMAGE_SHAPE, num_classes=_NUM_CLASSES, examples={}, files={}),
        train=_examples(_NUM_EXAMPLES),
        validation=_examples(_FEW),
        devices=jax.local_devices(),
        steps_per_call=_STEPS_PER_CALL,
    )
    order = CompiledFunction(name="order", call=call_order, cost=NO_COST, times=NO_TIMES)
    training.program = dataclasses.replace(program, config=config, steps_per_epoch=steps, order=order)
    training.predict = predict
    log = TrainingLog(Journal(Identity("train"), None), training)
    with contextlib.redirect_stderr(io.StringIO()):  # two short epochs
        training.train_network(config.seeds_of(config.seed), Checkpoints(None, 0.0), log)


def measure_evaluation(config: TrainConfig, evaluate: EvaluateConfig, keep: Keep) -> dict[str, dict[str, int]]:
    """Return the costs of the functions of `evaluate`."""
    with CompileLog() as log:
        compiler, model = _compiler(log), Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES))
        predict = inference.compile_predict(model, evaluate.batch_size, compiler=compiler)
        call, split = functools.partial(predict, _some_params(model)), _examples(_FEW)
        logits = inference.predict_logits(call, evaluate.batch_size, split)
        temperature, bins = fit_temperature(logits, split.labels), evaluate.calibration_bins
        evaluate_logits(logits, split.labels, temperature=temperature, calibration_bins=bins)
    keep("evaluate", compiler)
    return _costs("evaluate", compiler, log)


def measure_gradients(config: TrainConfig, gradients: GradientsConfig, keep: Keep) -> dict[str, dict[str, int]]:
    """Return the costs of the functions of `gradients`."""
    with CompileLog() as log:
        compiler, model = _compiler(log), Model(config.model_config(_IMAGE_SHAPE, _NUM_CLASSES))
        influenced = analysis.num_influenced(gradients, _NUM_EXAMPLES)
        compiled = passes.compile_passes(model, config.label_smoothing, influenced, compiler=compiler)
        splits = {"train": _examples(_FEW), "test": _examples(max(influenced, _FEW))}
        trajectory = analysis.Trajectory(
            params={0: _some_params(model), 1: _some_params(model)},
            scored=1,
            learning_rates=np.ones(1),
            steps_per_epoch=1,
            batch_size=_FEW,
        )
        few = dataclasses.replace(gradients, num_influenced=influenced, test_examples=())
        exact = compile_exact(model, config.label_smoothing, sample_size(splits), compiler=compiler)
        scores = analysis.analyze(compiled, trajectory, splits, few, _NUM_CLASSES).scores
        float64_errors(exact, trajectory.params[1], splits, scores, config.label_smoothing)
    keep("gradients", compiler)
    return _costs("gradients", compiler, log)


def read_record(path: Path) -> Record:
    """Read accepted costs; raise UserError if there are none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; `gradtrail gate --accept` writes it")
    return Record(**json.loads(path.read_text(encoding="utf-8")))


def as_table(changes: list[Change]) -> Table:
    """Return a table of the changes."""
    rows = []
    for change in changes:
        before, after = ("-" if value is None else f"{value:,}" for value in (change.before, change.after))
        ratio = f"{change.ratio:.3f}" if np.isfinite(change.ratio) else "-"
        tolerance = f"{TOLERANCES[change.metric]:.0%}"
        numbers = {"accepted": before, "found": after, "ratio": ratio, "tolerance": tolerance}
        rows.append({"function": change.function, "metric": change.metric} | numbers)
    return table("costs beyond their tolerance", rows, right=("accepted", "found", "ratio", "tolerance"))


def _compiler(log: CompileLog) -> Compiler:
    return Compiler(lambda: 0.0, log=log)


def _examples(count: int) -> Split:
    """Return images of two classes."""
    ids = np.arange(count, dtype=np.int32)
    images = np.zeros((count, *_IMAGE_SHAPE), np.uint8)
    labels = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), ids % 2)
    return Split(images=images, example_id=ids, **labels)


def _some_params(model: Model) -> HostParams:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype), model.abstract_params())


def _costs(stage: str, compiler: Compiler, log: CompileLog) -> dict[str, dict[str, int]]:
    """Return the metrics of each function, and as `<stage>/unplanned` the number of compilations that calls caused."""
    for line in compiler.warnings:
        print(f"{stage}: warning: {line}", file=sys.stderr)
    costs = {f"{stage}/{name}": metrics for name, metrics in costs_of(compiler).items()}
    return costs | {f"{stage}/unplanned": {"compilations": len(log.unplanned)}}


def _comparable(accepted: Mapping[str, str], current: Mapping[str, str]) -> frozenset[str]:
    if accepted == current:
        return frozenset(TOLERANCES)
    same_version = all(accepted.get(name) == current.get(name) for name in ("jax", "jaxlib"))
    return SAME_VERSION_METRICS if same_version else PORTABLE_METRICS


def _changed_params(accepted: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    before, after = flatten(accepted), flatten(current)
    return [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]


def _machine() -> dict[str, str]:
    device = jax.local_devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "architecture": platform.machine() if device.platform == "cpu" else device.device_kind,
        "devices": str(jax.local_device_count()),
    }


def _describe(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())
