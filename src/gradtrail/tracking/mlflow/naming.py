"""How runs and metrics are named in MLflow, and the description of a run that MLflow's UI shows.

Metric names are grouped by `/`, as the UI draws charts in groups, in alphabetical order: metrics that people compare
come first (`eval/`, `gradients/`, `profile/`, `steps/`); `system/`, named by MLflow, comes between them and `train/`.

The name of a run lists the params that differ from the reference, `reference_params.json`, which does not change with
`params.yaml`: so a name keeps its meaning, and follows only from the params of the run.

The description is Markdown with the main figure, made only from the run, so that every process writes the same. That of
a training also has the summary of its gradients, which comes from the run of another stage.
"""

import functools
import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradtrail.core.names import model_name
from gradtrail.stages.common.params import MEMBERS, SEED, active_params
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.tags import param_text, stage_params

_PREFIXES = {"fetch": "data", "preprocess": "data", "evaluate": "eval"}  # every other stage: its own name
_COMPILE = "compile/"
NOTE = "mlflow.note.content"  # tag: a run's description
_GRADIENTS, _LINEAGE = "### What the gradients say", "### Lineage"
COMPILED = Path("compile/functions.json")  # artifact: the table of what a stage compiled
SMALL_FIGURE = "description.png"  # artifact: the main figure, at the size that fits the UI
_SHOWN_FIGURE = re.compile(r"!\[[^]]*\]\(get-artifact\?[^)]*\)")
FIGURES = {  # stage → its main figure, and the caption
    "preprocess": ("samples.png", "Samples of every class"),
    "train": ("learning_curves.png", "Learning curves"),
    "evaluate": ("mistakes.png", "The worst mistakes"),
    "gradients": ("histograms.png", "Norms of the gradients"),
    "profile": ("costs.png", "Costs of the compiled functions"),
    "privacy_audit": ("privacy_audit.png", "Scores of canaries, and what guessing them proves"),
}
_REFERENCE, _OTHERS = "float32", ("bfloat16", "float16")
_OVER = f"_over_{_REFERENCE}"  # in names of metrics of `profile`: ratio of the times of a training step
_LEAST_FACTOR = 1.05  # ratio of the times of two precisions that is worth a sentence
_HEADLINES = {  # stage → metrics copied to its training's run; every metric of a stage that is not here
    "evaluate": (
        *("accuracy", "accuracy_low", "accuracy_high", "accuracy_sd", "accuracy_corrected_labels", "loss"),
        "expected_calibration_error",
        *("ensemble_accuracy", "ensemble_loss", "ensemble_expected_calibration_error"),
    ),
    "export": ("worst_class_recall",),
    "gradients": ("noise_scale_typical", "coherence_within_classes", "grad_norm_median"),
    "profile": (
        *("train_step_flops", "train_step_total_bytes"),
        *(f"{name}{_OVER}{end}" for name in _OTHERS for end in ("", "_low", "_high")),
    ),
    "report": (),
    "privacy_audit": ("epsilon_lower_bound",),
}
_ONLY_IN_FILES = {  # keys of metrics files that runs do not have; curves show the steps and the loss scale
    *("planned_steps", "members", "dataset", "dataset_digest", "steps", "loss_scale"),
}
_NOT_AVERAGED = {  # metrics whose means over members are not logged
    *("best_epoch", "best_validation_accuracy", "num_mistakes", "skipped_steps", "noise_scale"),
}
_LOGGED_SPREADS = {  # spreads of means over members that are logged; the rest is in files
    *(f"eval/accuracy_{end}" for end in ("sd", "low", "high")),
    *(f"eval/ensemble_accuracy_{end}" for end in ("low", "high")),  # over test examples
    *(f"train/validation_accuracy_{end}" for end in ("low", "high")),
}
_SEPARATOR = " · "
_DIGITS = 8  # digits of a digest in a name
_MAX_NAME_LENGTH = 250  # limit of MLflow's database
_FIRST = ("model", "optimizer", "schedule", "precision")  # params of `train` that begin a name, before the data set
_WITHOUT_NOUN = {"fetch.dataset", *(f"train.{name}" for name in _FIRST)}  # params whose value needs no noun
_NOUNS = {  # param or its last part → noun in names, if it differs
    "accumulation_steps": "accumulation",
    "adam_learning_rate": "adam lr",
    "average_decay": "average",
    "augmentation_multiplicity": "augmentations",
    "batch_size": "batch",
    "clip_norm": "clip",
    "cpu_threads": "threads",
    "end_fraction": "end",
    "example_clip_norm": "example clip",
    "keep_epochs": "keep",
    "kernel_size": "kernel",
    "label_smoothing": "smoothing",
    "learning_rate": "lr",
    "subset_fraction": "subset",
    "train.privacy.enabled": "private",
    "train.schedule_free.warmup_fraction": "averaging warm-up",
    "validation_fraction": "validation",
    "warmup_fraction": "warm-up",
    "weight_decay": "decay",
    "xla_flags": "flags",
}
_COUNTED = {"deformations", "epochs", "members"}  # nouns that follow their number
_PERCENT = {"label_noise", "subset_fraction", "validation_fraction", "warmup_fraction"}  # fractions shown in percent
_WITHOUT_SECTION = ("fetch", "preprocess", "train", "environment")  # sections that names leave out


def run_name(stage: Identity) -> str:
    """Return a name for the run of a stage, such as `cnn · sgd · seed 2`; see `name_of`."""
    return name_of(stage.name, stage_params(stage))


def name_of(stage: str, params: Mapping[str, Any]) -> str:
    """Return the name of the run of a stage with these flat params: the params that differ from the reference.

    Other params give another name. A training without differences is named after its model; the names of other stages
    begin with the stage. Params without effect come last.
    """
    used = active_params(params)
    words = [] if stage == TRAIN else [stage]
    words += list(_model(used)) + [_words(key, used[key]) for key in _ordered(used)]
    if not words or (stage == TRAIN and words[0].startswith("seed ")):
        words.insert(0, str(params.get("train.model", stage)))
    words += [f"unused {key} {_text(params[key])}" for key in params if key not in used and _differs(params, key)]
    name = _SEPARATOR.join(words)
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _MAX_NAME_LENGTH - len(digest) - 2]}… {digest}"


def _model(params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model, with the widths of its layers if they differ, unless it is the reference's."""
    kind = params.get("train.model")
    widths = {key: params[f"train.{kind}.{key}"] for key in _widths(params)}
    if any(_differs(params, f"train.{kind}.{key}") for key in widths):
        yield model_name(str(kind), **widths)
    elif "train.model" in params and _differs(params, "train.model"):
        yield "linear model" if kind == "linear" else str(kind)  # a schedule has that name too


def _widths(params: Mapping[str, Any]) -> list[str]:
    return [key for key in ("channels", "hidden") if f"train.{params.get('train.model')}.{key}" in params]


def _ordered(params: Mapping[str, Any]) -> list[str]:
    """Return the params that differ, without those of the model's name: `_FIRST` first, the seed last."""
    model_params = {"train.model", *(f"train.{params.get('train.model')}.{key}" for key in _widths(params))}
    first = [f"train.{name}" for name in _FIRST] + ["fetch.dataset"]
    keys = [key for key in params if key not in model_params and _differs(params, key)]
    return sorted(keys, key=lambda key: first.index(key) if key in first else len(first) + (key == SEED))


def _words(key: str, value: Any) -> str:
    """Return the words for a param in a name, such as `lr 0.01`, `1 epoch`, `label noise 10 %`, `remat`, `no clip`."""
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    noun = _NOUNS.get(key) or _NOUNS.get(last, "deformation " * (".deformation." in key) + last.replace("_", " "))
    if key in _WITHOUT_NOUN:
        return str(value)
    if key == "preprocess.seed":
        return f"split seed {value}"
    if section not in _WITHOUT_SECTION:
        noun = f"{section} {noun}"
    if last in _COUNTED:
        return f"{value} {last.removesuffix('s') if value == 1 else last}"
    if value is None or value is False:
        return f"no {noun}"
    if last == "secret_sha256":
        return f"secret {_text(value)[:_DIGITS]}"
    if value is True:
        return noun
    is_share = last in _PERCENT and isinstance(value, int | float)
    return f"{noun} {100 * value:.12g} %" if is_share else f"{noun} {_text(value)}"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) and value else param_text(value)


def _differs(params: Mapping[str, Any], key: str) -> bool:
    return key not in _reference() or param_text(params[key]) != param_text(_reference()[key])


@functools.cache
def _reference() -> dict[str, Any]:
    params: dict[str, Any] = json.loads(Path(__file__).with_name("reference_params.json").read_text(encoding="utf-8"))
    return params


def metric_name(stage: str, key: str) -> str:
    """Return the full name of a stage's metric, such as `train/compile_total_seconds`."""
    name = f"compile_{key.removeprefix(_COMPILE)}" if key.startswith(_COMPILE) else key
    return f"{_PREFIXES.get(stage, stage)}/{name}"


def is_logged(stage: str, key: str, metrics: Mapping[str, Any]) -> bool:
    """Whether a value of a metrics file is logged to the run."""
    if "members" in metrics and (key in _NOT_AVERAGED or is_hidden_spread(stage, key, metrics)):
        return False
    return not (key in _ONLY_IN_FILES or isinstance(metrics[key], str))


def is_hidden_spread(stage: str, key: str, means: Container[str]) -> bool:
    """Whether a metric or a column is the spread of a mean over members that is not logged."""
    mean, _, end = key.rpartition("_")
    return end in ("sd", "low", "high") and mean in means and metric_name(stage, key) not in _LOGGED_SPREADS


def is_headline(name: str, stage: str, precision: str = _REFERENCE) -> bool:
    """Whether a metric of a stage is copied to its training's run; `precision` is that of the training."""
    key = name.removeprefix(metric_name(stage, ""))
    if name == key or "/" in key or key.startswith("compile_"):
        return False
    compared = _OTHERS[0] if precision == _REFERENCE else precision  # one ratio; the run of `profile` has all
    if _OVER in key and key.partition(_OVER)[0] != compared:
        return False
    return stage not in _HEADLINES or key in _HEADLINES[stage]


def note(
    run_id: str, tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float], summary: str
) -> str:
    """Return the description of a run.

    Args:
        run_id: Id of the run.
        tags: Tags of the run.
        params: Params of the run.
        metrics: Metrics of the run, headline metrics of children included.
        summary: Summary of the gradients, as the stage wrote it or as `summary_in` returns it; empty for none.
    """
    trained = [_result(params, metrics), _training(metrics), _privacy(params, metrics)]
    parts = trained if tags["stage"] == "train" else []
    parts += [_precision(params, metrics), _figure(run_id, tags), _demoted(summary), _lineage(run_id, tags)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_in(text: str) -> str:
    """Return the summary of the gradients in a description; empty if it has none."""
    _, marker, rest = text.partition(_GRADIENTS)
    return (marker + rest.partition(_LINEAGE)[0]).strip()


def _result(params: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    if "eval/accuracy" not in metrics:
        return "Not evaluated yet: run `dvc repro`."
    interval = ""
    if "eval/accuracy_low" in metrics and "eval/accuracy_high" in metrics:
        interval = f"95 % interval: {metrics['eval/accuracy_low']:.2%} to {metrics['eval/accuracy_high']:.2%}"
    if "eval/ensemble_accuracy" in metrics:
        return (
            f"**Mean over {params.get(MEMBERS, 'several')} seeds: {metrics['eval/accuracy']:.2%} of the test images "
            f"are classified correctly** ({interval}, sd {metrics.get('eval/accuracy_sd', 0):.2%}); by their ensemble "
            f"**{metrics['eval/ensemble_accuracy']:.2%}**."
        )
    suffix = f" ({interval})" if interval else ""
    return f"**{metrics['eval/accuracy']:.2%} of the test images are classified correctly**{suffix}."


def _training(metrics: Mapping[str, float]) -> str:
    """Return sentences with the other main metrics, as far as they are known."""
    parts = {
        "{train/num_parameters:,.0f} parameters, {train/epochs:.0f} epochs.": ("train/num_parameters", "train/epochs"),
        "Training took {train/seconds:.1f} s.": ("train/seconds",),
        "Compilation took {train/compile_total_seconds:.1f} s.": ("train/compile_total_seconds",),
        "Validation accuracy {train/validation_accuracy:.2%}.": ("train/validation_accuracy",),
        "Test loss {eval/loss:.4f} nats.": ("eval/loss",),
        "Calibration error {eval/expected_calibration_error:.4f}.": ("eval/expected_calibration_error",),
        "Of the ensemble: test loss {eval/ensemble_loss:.4f} nats, calibration error "
        "{eval/ensemble_expected_calibration_error:.4f}.": (
            "eval/ensemble_loss",
            "eval/ensemble_expected_calibration_error",
        ),
        "Gradient noise scale {gradients/noise_scale_typical:,.0f} examples.": ("gradients/noise_scale_typical",),
    }
    return " ".join(form.format(**metrics) for form, names in parts.items() if all(name in metrics for name in names))


def _privacy(params: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """Return the privacy guarantee of a training, and what it does not cover; empty for other trainings."""
    if not {"train/epsilon", "train/delta"} <= metrics.keys():
        return ""
    covered = "Training loss and accuracy, and results on single training examples, are not covered by it."
    if params.get("train.privacy.release", "").lower() == "true":
        covered = "But for digests and sizes of the data, nothing here comes from training examples without noise."
    promise = "**Private: epsilon {train/epsilon:.3g} at delta {train/delta:g}** for each training example."
    return f"{promise.format(**metrics)} {covered}"


def precision_note(metrics: Mapping[str, float], precision: str, batch_size: int) -> str:
    """Return a sentence if a training loses time by its precision or could gain some by another; else empty.

    Args:
        metrics: Metrics of `profile`, with the prefix of the stage: ratios of the times of a training step.
        precision: Precision of the training.
        batch_size: Batch size of the training.
    """
    if precision != _REFERENCE:
        return _compared(metrics, precision, batch_size, "slower")
    sentences = (_compared(metrics, other, batch_size, "faster") for other in _OTHERS)
    return " ".join(sentence for sentence in sentences if sentence)


def _compared(metrics: Mapping[str, float], precision: str, batch_size: int, word: str) -> str:
    """Say that a precision is slower, or faster, than float32; empty where that is not clear or hardly matters."""
    name = metric_name("profile", f"{precision}{_OVER}")
    if f"{name}_high" not in metrics:
        return ""
    value, low, high = (metrics[f"{name}{end}"] for end in ("", "_low", "_high"))
    if word == "faster":
        value, low, high = 1 / value, 1 / high, 1 / low
    if low <= 1 or value < _LEAST_FACTOR:
        return ""
    return (
        f"{precision} is {value:.2f} × {word} than {_REFERENCE} on this machine at batch size {batch_size} "
        f"(95 % interval {low:.2f} to {high:.2f})."
    )


def _precision(params: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    batch = params.get("train.batch_size", "")
    return precision_note(metrics, params.get("train.precision", ""), int(batch)) if batch.isdecimal() else ""


def _figure(run_id: str, tags: Mapping[str, str]) -> str:
    """Return the figure that the description has, or else the main one of the stage, small.

    Its address is relative, so that it works wherever the UI is served.
    """
    if before := _SHOWN_FIGURE.search(tags.get(NOTE, "")):
        return before[0]
    if tags["stage"] not in FIGURES:
        return ""
    return f"![{FIGURES[tags['stage']][1]}](get-artifact?path={SMALL_FIGURE}&run_uuid={run_id})"


def _demoted(summary: str) -> str:
    """Return a summary with its headings one level down; one that was taken from a description has them already."""
    if not summary or summary.startswith(_GRADIENTS):
        return summary
    body = summary.partition("\n")[2].replace("\n## ", "\n#### ")
    return f"{_GRADIENTS}\n{body}".strip()


def _lineage(run_id: str, tags: Mapping[str, str]) -> str:
    commit = tags.get("mlflow.source.git.commit", "")
    changed = ", with changes (`git.diff`)" if tags.get("git.dirty") == "true" else ""
    data = f"{tags['dataset']} {tags['dataset_digest'][:8]}" if "dataset_digest" in tags else ""
    sentences = [
        f"Data set {data}." if data else "",
        f"Code of commit `{commit[:8]}`{changed}." if commit else "",
        f"Experiment `{tags['dvc.exp_name']}`." if "dvc.exp_name" in tags else "",
        f"`gradtrail show {run_id[:8]}` prints its lineage and how to restore its files.",
    ]
    return f"{_LINEAGE}\n\n{' '.join(sentence for sentence in sentences if sentence)}"
