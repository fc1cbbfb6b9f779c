"""How runs and metrics are named in MLflow, which metrics a run has, and the description that MLflow's UI shows.

Metric names are grouped by `/`, as the UI draws charts in groups, in alphabetical order: metrics that people compare
come first (`eval/`, `gradients/`, `profile/`, `steps/`); `system/`, named by MLflow, comes between them and `train/`.

A run is named after its model, optimizer and data set, the params that differ from the committed `params.yaml`, and the
seed. Its description is Markdown with the main figure, made only from the run, so that every process writes the same;
that of a training also has the summary of its gradients, which comes from the run of another stage.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrail.stages.common.params import SEED, active_params, flatten
from gradtrail.stages.common.pipeline_file import PARAMS_FILES, TRAIN, sections_of
from gradtrail.stages.common.yaml_file import parse_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs
from gradtrail.tracking.state import State
from gradtrail.tracking.tags import STAGE, param_text, stage_params

if TYPE_CHECKING:
    from jinja2 import Environment

COMPILED, RECOMPILED = Path("compile/functions.json"), Path("compile/recompilations.json")  # artifacts: tables
SMALL_FIGURE = "description.png"  # artifact: the main figure, at the size that fits the UI
FIGURES = {  # stage → its main figure, and the caption
    "preprocess": ("samples.png", "Samples of every class"),
    "train": ("learning_curves.png", "Learning curves"),
    "evaluate": ("mistakes.png", "The worst mistakes"),
    "gradients": ("histograms.png", "Norms of the gradients"),
    "profile": ("costs.png", "Costs of the compiled functions"),
    "privacy_audit": ("privacy_audit.png", "Scores of canaries, and what guesses by them prove"),
}
_PREFIXES = {"fetch": "data", "preprocess": "data", "evaluate": "eval"}  # every other stage: its own name
_NAMED = ("train.model", "train.optimizer", "fetch.dataset")  # params whose values begin the name of a run
_DIGESTS = ("train.start.sha256", "train.privacy.secret_sha256")  # not in the name of a run
_CLEAR = {"train.precision", "train.schedule", "train.loss"}  # params whose values say what they are
_SHORT_SECTIONS = re.compile(r"(fetch|preprocess|train|environment)\.(?!seed)")  # left out in names
_MAX_NAME_LENGTH = 250  # limit of MLflow's database
_GRADIENTS, _LINEAGE = "### What the gradients say", "### Lineage"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is made of a metric, or of all metrics whose names match a pattern."""

    is_logged: bool = True  # False: only the metrics file has it; curves show the steps and the loss scale
    is_averaged: bool = True  # False: a run of several members has no mean of it
    is_headline: bool = False  # True: it is copied to the training's run
    spread: tuple[str, ...] = ()  # ends of the spread of a mean over members that are logged; the others are in files
    best: Callable[[Iterable[float]], float] | None = None  # chooses the value of a curve that is logged as best


_HEADLINE = Metric(is_headline=True)
METRICS = {  # full name, as a regular expression → what is made of the metric; the first match counts
    "train/validation_accuracy": Metric(best=max, spread=("low", "high")),
    "train/validation_loss": Metric(best=min),
    "train/(best_epoch|best_validation_accuracy|skipped_steps|noise_scale)": Metric(is_averaged=False),
    "train/(steps|planned_steps|loss_scale)": Metric(is_logged=False),
    "eval/(balanced_)?accuracy(_low|_high|_sd)?": Metric(is_headline=True, spread=("sd", "low", "high")),
    "eval/ensemble_(balanced_)?accuracy": Metric(is_headline=True, spread=("low", "high")),  # over test examples
    "eval/(ensemble_)?(loss|expected_calibration_error)": _HEADLINE,
    "eval/(error_percent|accuracy_corrected_labels|top_5_accuracy)": _HEADLINE,
    "eval/num_mistakes": Metric(is_logged=False),
    "export/worst_class_recall": _HEADLINE,
    "gradients/(noise_scale_typical|coherence_within_classes|grad_norm_median)": _HEADLINE,
    "profile/(train_step_flops|train_step_total_bytes)": _HEADLINE,
    "profile/bfloat16_over_float32(_low|_high)?": _HEADLINE,  # ratio of the times of a training step
    "privacy_audit/epsilon_lower_bound": _HEADLINE,
    "what_if/metasmoothness": _HEADLINE,
    ".*/members": Metric(is_logged=False),
    "(train|eval|export|gradients|profile|report|privacy_audit|what_if)/.*|.*/compile_.*|.*/.*/.*": Metric(),
    ".*": _HEADLINE,  # of stages that people add
}


@functools.cache
def _metric(name: str) -> Metric:
    """Return the row of a metric, by its full name."""
    return next(metric for pattern, metric in METRICS.items() if re.fullmatch(pattern, name))


def run_name(stage: State) -> str:
    """Return a name for the run of a stage, such as `bfloat16 · epochs=1 · cnn sgd mnist · seed 2`."""
    return name_of(stage.name, stage_params(stage), _committed_params())


def name_of(stage: str, params: Mapping[str, Any], committed: Mapping[str, Any]) -> str:
    """Return the name of the run of a stage with these flat params, in which what differs comes first.

    One that is no training begins with the stage.
    """
    used = active_params(params)
    base = [str(used[key]) for key in _NAMED if key in used]
    unnamed = (*_NAMED, *_DIGESTS, SEED)
    texts = {key: param_text(value) for key, value in used.items() if committed and key not in unnamed}
    differing = {key: text for key, text in texts.items() if text != param_text(committed.get(key))}
    words = [
        text if key in _CLEAR else f"{_SHORT_SECTIONS.sub('', key, count=1)}={text}" for key, text in differing.items()
    ]
    if stage != TRAIN:
        words, base = ([stage, *words], base) if words else ([], [stage, *base])
    words += [" ".join(base)] if base else []
    words += [f"seed {used[SEED]}"] if SEED in used else []
    return " · ".join(words)[:_MAX_NAME_LENGTH]


def seeds_name(name: str, count: int) -> str:
    """Return a name for the parent of trainings that differ only in the seed, from the name of one of them."""
    return f"{re.sub(r' · seed [0-9]+$', '', name)[: _MAX_NAME_LENGTH - 20]} · {count} seeds"


@functools.cache
def _committed_params() -> dict[str, Any]:
    """Return the flat params of the commit that is checked out; empty if there is none."""
    with contextlib.suppress(UserError):  # a name without what differs is better than no run
        contents = blobs("HEAD", PARAMS_FILES)
        return flatten(sections_of({file: parse_yaml(content, file) for file, content in contents.items()}))
    return {}


def metric_name(stage: str, key: str) -> str:
    """Return the full name of a stage's metric, such as `train/compile_total_seconds`."""
    name = f"compile_{key.removeprefix('compile/')}" if key.startswith("compile/") else key
    return f"{_PREFIXES.get(stage, stage)}/{name}"


def run_metrics(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a run has of those in its metrics file, by their full names.

    An evaluation also has its error in percent, as MLflow's charts show two decimals: 1.40 and 1.55 rather than 0.99.
    """
    values = dict(metrics)
    if "num_mistakes" in metrics:
        values |= {"error_percent": 100 * (1 - metrics["accuracy"])}
    return {metric_name(stage, key): rounded(values[key]) for key in values if is_logged(stage, key, values)}


def rounded(value: float) -> float:
    """Return a number with four significant digits, or as a whole number if it has more, for people to read."""
    if not math.isfinite(value) or float(value).is_integer():
        return float(value)
    return round(float(value), max(0, 3 - math.floor(math.log10(abs(value)))))


def best_values(curves: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the best values of curves, name → step → value, by their names, such as `train/best_validation_loss`.

    They are biased towards the better. A curve without finite values, as some of a redacted training, has none.
    """
    finite = {name: [value for value in curve.values() if math.isfinite(value)] for name, curve in curves.items()}
    return {
        name.replace("/", "/best_", 1): rounded(best(values))
        for name, values in finite.items()
        if values and (best := _metric(name).best)
    }


def is_logged(stage: str, key: str, metrics: Mapping[str, Any]) -> bool:
    """Whether a value of a metrics file is logged to the run."""
    metric = _metric(metric_name(stage, key))
    if "members" in metrics and (not metric.is_averaged or is_hidden_spread(stage, key, metrics)):
        return False
    return metric.is_logged and not isinstance(metrics[key], str)


def is_hidden_spread(stage: str, key: str, means: Container[str]) -> bool:
    """Whether a metric or a column is the spread of a mean over members that is not logged."""
    mean, _, end = key.rpartition("_")
    return end in ("sd", "low", "high") and mean in means and end not in _metric(metric_name(stage, mean)).spread


def is_headline(name: str, stage: str) -> bool:
    """Whether a metric of a stage is copied to its training's run."""
    return name.startswith(metric_name(stage, "")) and _metric(name).is_headline


def note(
    run_id: str, tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float], summary: str
) -> str:
    """Return the description of a run, from its tags, params and metrics, headline metrics of children included.

    The summary of the gradients is given as the stage wrote it or as `summary_in` returns it; empty for none.
    """
    if summary and not summary.startswith(_GRADIENTS):  # as the stage wrote it: its headings go one level down
        summary = f"{_GRADIENTS}\n{summary.partition(chr(10))[2]}".replace("\n## ", "\n#### ").strip()
    run = {"run_id": run_id, "stage": tags[STAGE], "tags": tags, "params": params, "metrics": metrics}
    figure, caption = FIGURES.get(tags[STAGE], ("", ""))
    return rendered("run.md.j2", **run, figure=figure and SMALL_FIGURE, caption=caption, summary=summary)


def rendered(template: str, **values: object) -> str:
    """Return a description in Markdown; a paragraph of the template may be empty."""
    return re.sub(r"\n{3,}", "\n\n", _templates().get_template(template).render(values)).strip() + "\n"


@functools.cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: stages import this module

    folder = FileSystemLoader(Path(__file__).with_name("descriptions"))
    return Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - Markdown


def summary_in(text: str) -> str:
    """Return the summary of the gradients in a description; empty if it has none."""
    _, marker, rest = text.partition(_GRADIENTS)
    return (marker + rest.partition(_LINEAGE)[0]).strip()


def precision_note(metrics: Mapping[str, float], precision: str, batch_size: int) -> str:
    """Return a sentence if a training loses time by its precision or could gain some by another; else empty.

    `metrics` are those of `profile`, with the prefix of the stage: ratios of the times of a training step.
    """
    sentences = []
    for other in ("bfloat16", "float16") if precision == "float32" else [precision]:
        name = metric_name("profile", f"{other}_over_float32")
        ratio, low, high = (metrics.get(f"{name}{end}", 1.0) for end in ("", "_low", "_high"))
        if (high < 1 and ratio <= 0.95) if precision == "float32" else (low > 1 and ratio >= 1.05):
            sentences.append(
                f"A training step in {other} takes {ratio:.2f} × the time of one in float32 on this machine at batch "
                f"size {batch_size} (95 % interval {low:.2f} to {high:.2f})."
            )
    return " ".join(sentences)
