"""How a figure is called in MLflow: grouped by `/`, as the UI draws its charts in groups, in the order of the alphabet.

So what a person compares comes first (`eval/`, `gradients/`, `steps/`, `train/`), and what single compiled functions
cost comes last, as `xla/`.

What a row says of itself in words: the description that MLflow's UI shows, in Markdown, with the main picture.

Made from the row alone, so that it is the same whoever makes it. A training's note also has what its gradients say,
which comes from the row of another stage.
"""

from collections.abc import Mapping

_PREFIXES = {"fetch": "data", "preprocess": "data", "evaluate": "eval"}  # every other stage: its own name
_COMPILE = "compile/"


def metric_name(stage: str, key: str) -> str:
    """Return the name of a stage's figure: of its compiling as a whole `train/compile_…`, of a function `xla/…`."""
    group = _PREFIXES.get(stage, stage)
    if not key.startswith(_COMPILE):
        return f"{group}/{key}"
    figure = key.removeprefix(_COMPILE)
    return f"xla/{figure}" if "/" in figure else f"{group}/compile_{figure}"


def is_headline(name: str, stage: str) -> bool:
    """Whether a figure of a stage is one that stands on its training's row too: of no single class or function."""
    return name.startswith(metric_name(stage, "")) and name.count("/") == 1 and "/compile_" not in name


NOTE = "mlflow.note.content"  # what the UI shows as a run's description
_GRADIENTS, _LINEAGE = "### What the gradients say", "### Lineage"
_PICTURES = {  # stage → its main picture, and what it shows
    "preprocess": ("samples.png", "Samples of every class"),
    "train": ("learning_curves.png", "Learning curves"),
    "evaluate": ("mistakes.png", "The worst mistakes"),
    "gradients": ("histograms.png", "Norms of the gradients"),
    "profile": ("costs.png", "What the compiled functions cost"),
}
_FIGURES = {  # metric → title, how it is written
    "train/epochs": ("epochs", "{:.0f}"),
    "train/num_parameters": ("parameters", "{:,.0f}"),
    "train/validation_accuracy": ("validation accuracy", "{:.2%}"),
    "eval/loss": ("test loss", "{:.4f}"),
    "eval/expected_calibration_error": ("calibration error", "{:.4f}"),
    "train/seconds": ("training, s", "{:.1f}"),
    "train/compile_total_seconds": ("compiling, s", "{:.1f}"),
    "gradients/noise_scale_typical": ("noise scale", "{:,.0f}"),
}


def note(run_id: str, tags: Mapping[str, str], metrics: Mapping[str, float], summary: str) -> str:
    """Return the note of a row.

    Args:
        run_id: of the row.
        tags: of the row.
        metrics: of the row, with the headlines of others where it is a training's.
        summary: what the gradients say, as a file has it or as `summary_in` finds it; empty for nothing.
    """
    parts = [_result(metrics), _table(metrics)] if tags["stage"] == "train" else []
    parts += [_picture(run_id, tags["stage"]), _demoted(summary), _lineage(run_id, tags)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_in(text: str) -> str:
    """Return the part of a note that says what the gradients say; empty where it has none."""
    _, marker, rest = text.partition(_GRADIENTS)
    return (marker + rest.partition(_LINEAGE)[0]).strip()


def _result(metrics: Mapping[str, float]) -> str:
    if "eval/accuracy" not in metrics:
        return "Not evaluated yet: `dvc repro` does."
    interval = ""
    if "eval/accuracy_low" in metrics and "eval/accuracy_high" in metrics:
        interval = f" (95 % interval: {metrics['eval/accuracy_low']:.2%} to {metrics['eval/accuracy_high']:.2%})"
    return f"**{metrics['eval/accuracy']:.2%}** of the test images are classified rightly{interval}."


def _table(metrics: Mapping[str, float]) -> str:
    shown = {title: how.format(metrics[name]) for name, (title, how) in _FIGURES.items() if name in metrics}
    return "\n".join(f"| {' | '.join(row)} |" for row in (shown, ["---"] * len(shown), shown.values())) if shown else ""


def _picture(run_id: str, stage: str) -> str:
    """Return the main picture; its address is relative, so that it holds wherever the UI is served."""
    if stage not in _PICTURES:
        return ""
    file, shown = _PICTURES[stage]
    return f"![{shown}](get-artifact?path=results%2F{file}&run_uuid={run_id})"


def _demoted(summary: str) -> str:
    """Return a summary with its headings below the note's own; one that was taken from a note has them already."""
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
        f"`gradtrail show {run_id[:8]}` says what it is made of, and how its files come back.",
    ]
    return f"{_LINEAGE}\n\n{' '.join(sentence for sentence in sentences if sentence)}"
