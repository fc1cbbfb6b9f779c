"""How runs and metrics are named in MLflow, and the description of a run that MLflow's UI shows.

Metric names are grouped by `/`, as the UI draws charts in groups, in alphabetical order: what a person compares comes
first (`eval/`, `gradients/`, `steps/`, `train/`), and the costs of single compiled functions come last, as `xla/`.

The description is Markdown with the main figure, made from the run alone, so that it is the same whichever process
writes it. That of a training also has the summary of its gradients, which comes from the run of another stage.
"""

from collections.abc import Mapping
from typing import Any

from gradtrail.core.common.names import model_name
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.tags import stage_params

_PREFIXES = {"fetch": "data", "preprocess": "data", "evaluate": "eval"}  # every other stage: its own name
_COMPILE = "compile/"
NOTE = "mlflow.note.content"  # what the UI shows as a run's description
_GRADIENTS, _LINEAGE = "### What the gradients say", "### Lineage"
_FIGURES = {  # stage → its main figure, and what it shows
    "preprocess": ("samples.png", "Samples of every class"),
    "train": ("learning_curves.png", "Learning curves"),
    "evaluate": ("mistakes.png", "The worst mistakes"),
    "gradients": ("histograms.png", "Norms of the gradients"),
    "profile": ("costs.png", "Costs of the compiled functions"),
}
_METRICS = {  # metric → title, format
    "train/epochs": ("epochs", "{:.0f}"),
    "train/num_parameters": ("parameters", "{:,.0f}"),
    "train/validation_accuracy": ("validation accuracy", "{:.2%}"),
    "eval/loss": ("test loss", "{:.4f}"),
    "eval/expected_calibration_error": ("calibration error", "{:.4f}"),
    "train/seconds": ("training, s", "{:.1f}"),
    "train/compile_total_seconds": ("compiling, s", "{:.1f}"),
    "gradients/noise_scale_typical": ("noise scale", "{:,.0f}"),
}


def run_name(stage: Identity) -> str:
    """Return a name for the run of a stage, such as `mlp-256-128 adamw warmup_cosine float32 mnist`."""
    params = stage_params(stage)
    if stage.name == TRAIN:
        how = [params[f"train.{part}"] for part in ("optimizer", "schedule", "precision")]
        return " ".join([_model_name(params), *how, params["fetch.dataset"]])
    if f"{stage.name}.weights" in params:
        return f"{stage.name} {params[f'{stage.name}.weights']}"
    if stage.is_below_training:
        return f"{stage.name} {_model_name(params)} {params['train.optimizer']} {params['train.precision']}"
    return f"{stage.name} {params.get('fetch.dataset', '')}".strip()


def _model_name(params: Mapping[str, Any]) -> str:
    kind = params["train.model"]
    widths = {key: params.get(f"train.{kind}.{key}", ()) for key in ("channels", "hidden")}
    return model_name(kind, **widths)


def metric_name(stage: str, key: str) -> str:
    """Return the name of a stage's metric; of compiling, `train/compile_…` in all and `xla/…` for one function."""
    group = _PREFIXES.get(stage, stage)
    if not key.startswith(_COMPILE):
        return f"{group}/{key}"
    metric = key.removeprefix(_COMPILE)
    return f"xla/{metric}" if "/" in metric else f"{group}/compile_{metric}"


def is_headline(name: str, stage: str) -> bool:
    """Whether a metric of a stage is copied to its training's run: those of single classes and functions are not."""
    return name.startswith(metric_name(stage, "")) and name.count("/") == 1 and "/compile_" not in name


def note(run_id: str, tags: Mapping[str, str], metrics: Mapping[str, float], summary: str) -> str:
    """Return the description of a run.

    Args:
        run_id: of the run.
        tags: of the run.
        metrics: of the run; for a training with the headline metrics of the runs below it.
        summary: of the gradients, as the stage wrote it or as `summary_in` finds it; empty for none.
    """
    parts = [_result(metrics), _table(metrics)] if tags["stage"] == "train" else []
    parts += [_figure(run_id, tags["stage"]), _demoted(summary), _lineage(run_id, tags)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_in(text: str) -> str:
    """Return the summary of the gradients in a description; empty where it has none."""
    _, marker, rest = text.partition(_GRADIENTS)
    return (marker + rest.partition(_LINEAGE)[0]).strip()


def _result(metrics: Mapping[str, float]) -> str:
    if "eval/accuracy" not in metrics:
        return "Not evaluated yet: run `dvc repro`."
    interval = ""
    if "eval/accuracy_low" in metrics and "eval/accuracy_high" in metrics:
        interval = f" (95 % interval: {metrics['eval/accuracy_low']:.2%} to {metrics['eval/accuracy_high']:.2%})"
    return f"**{metrics['eval/accuracy']:.2%}** of the test images are classified correctly{interval}."


def _table(metrics: Mapping[str, float]) -> str:
    shown = {title: form.format(metrics[name]) for name, (title, form) in _METRICS.items() if name in metrics}
    return "\n".join(f"| {' | '.join(row)} |" for row in (shown, ["---"] * len(shown), shown.values())) if shown else ""


def _figure(run_id: str, stage: str) -> str:
    """Return the main figure; its address is relative, so that it works wherever the UI is served."""
    if stage not in _FIGURES:
        return ""
    file, shown = _FIGURES[stage]
    return f"![{shown}](get-artifact?path=results%2F{file}&run_uuid={run_id})"


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
