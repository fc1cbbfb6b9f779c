"""Seconds and memory of stages that have not run yet, from earlier runs on this kind of machine.

Each similar earlier run predicts: what it took besides, plus its work, scaled. The estimate is the median. A training
is compiled, and a few of its steps are timed on random images, unless that was done before; the compiled functions stay
in the compilation cache, from which the training then takes them. Seconds are those of the last line of a stage.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradtrail
from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import MEMBERS, PARAMS, active_params, flatten
from gradtrail.stages.common.pipeline_file import TRAIN, StageSpec, read_locks, sha256_of
from gradtrail.stages.common.versions import VERSIONS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.paths import private_folder
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.ship import attempt_file
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import param_text

_RUNS = 5  # most similar earlier runs that an estimate is made of
_READ = 20  # newest runs of a stage whose timings are read
_LEAST_HALF_WIDTH, _LARGEST_HALF_WIDTH = 0.2, 0.25  # shares of the estimate: the speed of a machine drifts
# Stage → share of its work that the amount of `_work` scales
_SCALED = {"preprocess": 0.5, "evaluate": 0.8, "gradients": 0.85, "profile": 0.8}
# Params that select which earlier runs compiled most of the same functions
_MODEL = ("train.model", "train.precision", "train.mlp.", "train.cnn.", "train.mixer.", "train.own.", "train.features")
_PROGRAMS = {
    "evaluate": _MODEL,
    "export": (*_MODEL, MEMBERS),
    "gradients": (*_MODEL, "train.label_smoothing"),
    "profile": ("train.",),
}
Params = Mapping[str, str]  # dotted key → value as text, as a run has it; those that have an effect


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a training is, and the memory that it needs."""

    step_seconds: float
    predict_seconds: float  # of an example
    total_bytes: int  # memory of the largest compiled function


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated seconds and memory of a stage."""

    seconds: float
    half_width: float  # share of the seconds
    peak_bytes: float  # largest resident set; 0 if no earlier run recorded one

    @property
    def interval(self) -> tuple[float, float, float]:
        """The seconds, and both ends of their interval."""
        return self.seconds, self.seconds * (1 - self.half_width), self.seconds * (1 + self.half_width)


@dataclass(frozen=True, kw_only=True)
class Past:
    """An earlier execution of a stage on this kind of machine."""

    stage: str
    params: Params
    seconds: float  # whole stage
    work_seconds: float  # without imports, reading, compiling and logging
    compile_seconds: float
    loop_seconds: float  # of a training: all epochs
    steps: int  # of a training: optimizer steps of all members
    is_warm: bool  # whether all compiled functions came from the compilation cache
    pace: Pace | None  # of a training
    peak_bytes: float


def estimate_stages(
    pipeline: Mapping[str, StageSpec], params: Mapping[str, Any], stages: Sequence[str]
) -> tuple[dict[str, Estimate], list[str]]:
    """Return the estimates of stages that have earlier runs, and notes for the user."""
    texts = active_params({key: param_text(value) for key, value in flatten(params).items()})
    reads_training = {stage for stage in stages if stage == TRAIN or stage in _PROGRAMS}
    if reads_training:
        from gradtrail.experiments.pace import (  # late, as all imports of JAX here: it takes a second
            require_network,
            set_up,
        )

        set_up(params)
    pace = _pace(params, _examples(texts)[TRAIN]) if TRAIN in stages and _examples(texts) else None
    if TRAIN in stages and not pace:
        require_network(params)
    history = _read_history([*stages, *([TRAIN] if reads_training else [])])
    estimates, notes = dict[str, Estimate](), list[str]()
    for stage in stages:
        read = {*pipeline[stage].params.get(str(PARAMS), ()), "fetch", "preprocess"} - {"environment"}
        read |= {TRAIN} if stage in reads_training else set()
        stage_params = {key: value for key, value in texts.items() if key.partition(".")[0] in read}
        if estimate := _estimate(stage, stage_params, history[stage], pace, history.get(TRAIN, [])):
            estimates[stage] = estimate
        else:
            why = "no data set yet" if history[stage] else f"no earlier run on this kind of machine, {machine_key()}"
            notes.append(f"{stage}: {why}")
    return estimates, notes


def _estimate(
    stage: str, params: Params, past: Sequence[Past], pace: Pace | None, trainings: Sequence[Past]
) -> Estimate | None:
    """Return the estimate of a stage by the most similar of its earlier runs; None if there are none."""
    ranked = sorted(past, key=lambda run: -len(params.items() & run.params.items()))
    is_warm = stage == TRAIN or any(_same_programs(stage, params, run.params) for run in past)
    examples, predictions, peaks = _examples(params), [], []
    for run in ranked[:_RUNS]:
        fixed = run.seconds - run.compile_seconds + _compile_seconds(ranked, is_warm=is_warm)
        if run.peak_bytes:
            more = pace.total_bytes - run.pace.total_bytes if stage == TRAIN and pace and run.pace else 0
            peaks.append(run.peak_bytes + max(more, -run.peak_bytes / 2))
        if stage != TRAIN:
            old, new = (_work(stage, values, pace, trainings) for values in (run.params, params))
            share = _SCALED.get(stage, 0.0)
            predictions.append(fixed + share * run.work_seconds * (new / old - 1) if old and new else fixed)
        elif pace and run.pace and run.steps and examples:
            # Validation, shuffling and records take a share of the time of the steps
            ratio = run.loop_seconds / (run.steps * run.pace.step_seconds)
            work = ratio * _steps(params, examples[TRAIN]) * pace.step_seconds
            predictions.append(fixed - run.loop_seconds + work)
    if not predictions:
        return None
    seconds = max(statistics.median(predictions), 0.1)
    half_width = min(max(statistics.pstdev(predictions) / seconds, _LEAST_HALF_WIDTH), _LARGEST_HALF_WIDTH)
    return Estimate(seconds=seconds, half_width=half_width, peak_bytes=statistics.median(peaks) if peaks else 0.0)


def _compile_seconds(ranked: Sequence[Past], *, is_warm: bool) -> float:
    """Return the seconds of compiling, by the most similar runs that compiled, or that took all from the cache."""
    seconds = [run.compile_seconds for run in ranked if run.is_warm == is_warm][:_RUNS]
    if seconds:
        return statistics.median(seconds)
    return statistics.median(run.compile_seconds for run in ranked) * (0.25 if is_warm else 4.0)


def _work(stage: str, params: Params, pace: Pace | None, trainings: Sequence[Past]) -> float:
    """Return the amount of a stage's work that params change, in units of the stage; 0 if it is unknown."""
    if stage not in _SCALED or not (examples := _examples(params)):
        return 0.0
    held_out = examples["validation"] + examples["test"]
    if stage == "preprocess":
        return float(examples[TRAIN] + held_out)
    if stage == "profile":
        smallest, largest = (int(params[f"profile.{end}_batch_size"]) for end in ("smallest", "largest"))
        sizes = {1 << power for power in range(largest.bit_length())} - set(range(smallest))
        precisions = set(re.findall(r"\w+", params["profile.precisions"])) - {params["train.precision"]}
        variants = len(sizes - {int(params["train.batch_size"])}) + len(precisions) + (params["train.model"] == "cnn")
        return (5 + variants) * (0.15 + float(params["profile.seconds"]))
    paces = (run.pace for run in trainings if run.pace and _same_programs("gradients", params, run.params))
    model_pace = next(paces, pace)
    if model_pace is None or stage not in ("evaluate", "gradients"):
        return 0.0
    members = int(params[MEMBERS])
    if stage == "evaluate":
        return members * (0.3 + held_out * model_pace.predict_seconds)  # a fixed part for tables and bootstrap samples
    epochs = {int(epoch) for epoch in re.findall(r"\d+", params["train.keep_epochs"])} | {int(params["train.epochs"])}
    num_epochs = len([epoch for epoch in epochs if epoch <= int(params["train.epochs"])])
    visits = num_epochs * (3 * examples[TRAIN] + held_out) + examples[TRAIN] + held_out
    return members * visits * model_pace.predict_seconds


def _steps(params: Params, num_examples: int) -> int:
    """Return the number of optimizer steps of all members of a training."""
    return (
        math.ceil(num_examples / int(params["train.batch_size"])) * int(params["train.epochs"]) * int(params[MEMBERS])
    )


def _examples(params: Params) -> dict[str, int]:
    """Return the number of examples in each split, from those of the data that are here; empty for another data set."""
    path, lock = Path("data/processed/dataset.json"), read_locks(Path())
    if not path.is_file() or not {"fetch", "preprocess"} <= lock.keys():
        return {}
    made = {
        key: param_text(value)
        for stage in ("fetch", "preprocess")
        for key, value in flatten(lock[stage].get("params", {}).get(str(PARAMS), {})).items()
    }
    if made.get("fetch.dataset") != params["fetch.dataset"]:
        return {}
    counts: dict[str, int] = read_json(path)["examples"]
    subset, fraction = (
        [float(values[f"preprocess.{key}"]) for values in (made, params)]
        for key in ("subset_fraction", "validation_fraction")
    )
    scale = subset[1] / subset[0]
    learned = (counts[TRAIN] + counts["validation"]) * scale
    return {
        TRAIN: round(learned * (1 - fraction[1])),
        "validation": round(learned * fraction[1]),
        "test": round(counts["test"] * scale),
    }


def _pace(params: Mapping[str, Any], num_examples: int) -> Pace:
    """Compile a training and time some of its steps on random images; the result is kept for its params and code.

    Raises:
        UserError, ConfigError: the training cannot be made, or does not fit into memory; one line.
    """
    code = {str(path): path.stat().st_mtime_ns for path in sorted(Path(gradtrail.__file__ or "").parent.rglob("*.py"))}
    values = {key: value for key, value in flatten(params[TRAIN]).items() if key not in ("seed", "keep_epochs")}
    about = [values, params["environment"], num_examples, read_yaml(VERSIONS), machine_key(), code]
    file = private_folder() / "paces" / f"{sha256_of({'pace': about})}.json"
    if file.is_file():
        return Pace(**read_json(file))
    from gradtrail.experiments.pace import time_training

    pace = Pace(**time_training(params, num_examples))
    write_json(file, asdict(pace))
    return pace


def _same_programs(stage: str, params: Params, other: Params) -> bool:
    """Whether a stage with these params compiles most of the functions that it compiled with others."""
    keys = [key for key in {*params, *other} if key.startswith(_PROGRAMS.get(stage, ())) and key != "train.seed"]
    return all(params.get(key) == other.get(key) for key in keys)


def _read_history(stages: Iterable[str]) -> dict[str, list[Past]]:
    """Return the newest finished executions of stages on this kind of machine, newest first."""
    client, machine = open_store(), machine_key()
    find = StoredRuns(client)
    history: dict[str, list[Past]] = {}
    for stage in {*stages, TRAIN}:
        history[stage] = []
        for run in find({"stage": stage}, finished=True)[:_READ]:
            tags, metrics = run.data.tags, run.data.metrics
            text = read_artifact(client, run.info.run_id, attempt_file("timings", int(tags.get("attempts", 1))))
            timings = json.loads(text or "{}")
            functions = {row["function"]: row for row in timings.get("functions", ())}
            # A stage that does not use JAX does not know the accelerator
            is_here = tags.get("machine") == machine or (not functions and machine.startswith(tags.get("machine", "-")))
            if "seconds" not in timings or not is_here:
                continue
            parts, cache = timings["seconds"], timings.get("cache", {})
            compiling = min(metrics.get(metric_name(stage, "compile/total_seconds"), 0.0), parts["work"])
            history[stage].append(
                Past(
                    stage=stage,
                    params=active_params(dict(run.data.params)),
                    seconds=sum(parts.values()),
                    work_seconds=max(0.0, parts["work"] - compiling),
                    compile_seconds=compiling,
                    loop_seconds=metrics.get("train/seconds", 0.0) if stage == TRAIN else 0.0,
                    is_warm=cache.get("hits", 0) >= cache.get("requests", 0),
                    steps=_steps_made(run.data.params, metrics),
                    pace=_pace_in(functions),
                    peak_bytes=timings.get("peak_memory_bytes", 0.0),
                )
            )
    return history


def _pace_in(functions: Mapping[str, Mapping[str, Any]]) -> Pace | None:
    """Return the pace in the timings of a training; None for another stage, or one of very few steps."""
    step, predict = (functions.get(name, {}).get("steady_call_seconds") for name in ("train_step", "predict"))
    if step is None or predict is None:
        return None
    from gradtrail.core.nn.inference import VALIDATION_BATCH_SIZE

    most = max(row["total_bytes"] for row in functions.values())
    return Pace(step_seconds=step, predict_seconds=predict / VALIDATION_BATCH_SIZE, total_bytes=most)


def _steps_made(params: Params, metrics: Mapping[str, float]) -> int:
    """Return the steps that a training made, by the epochs after which it ended."""
    examples = _examples(params) if "train.epochs" in params else {}
    epochs = str(int(metrics.get("train/epochs", 0)))
    return _steps({**params, "train.epochs": epochs}, examples[TRAIN]) if examples else 0
