"""The names of models, which weights, runs, figures and the report share."""

from collections.abc import Sequence


def model_name(kind: str, *, channels: Sequence[int] = (), hidden: Sequence[int] = (), features: str = "none") -> str:
    """Return the name of a network from its kind, the widths of its layers and its features, such as `mlp-256-128`.

    Features other than `none` end it: `linear on oriented gradients`.
    """
    name = "-".join([kind, *map(str, (*channels, *hidden))])
    return name if features == "none" else f"{name} on {features.replace('_', ' ')}"
