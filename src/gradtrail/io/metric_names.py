"""How a figure is called in MLflow: grouped by `/`, as the UI draws its charts in groups, in the order of the alphabet.

So what a person compares comes first (`eval/`, `gradients/`, `steps/`, `train/`), and what single compiled functions
cost comes last, as `xla/`.
"""

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
