"""How a figure is called in MLflow: grouped by `/`, so that the UI's charts come out in groups."""

_PREFIXES = {"fetch": "data", "preprocess": "data", "evaluate": "eval"}  # every other stage: its own name


def metric_name(stage: str, key: str) -> str:
    """Return the name of a stage's figure; costs of compiled functions stand together, whatever the stage."""
    return key if key.startswith("compile/") else f"{_PREFIXES.get(stage, stage)}/{key}"
