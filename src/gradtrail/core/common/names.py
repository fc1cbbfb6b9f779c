"""The names of models, which weights, runs, figures and the report share."""

from collections.abc import Sequence


def model_name(kind: str, *, channels: Sequence[int] = (), hidden: Sequence[int] = ()) -> str:
    """Return the name of a network from its kind and the widths of its layers, such as `mlp-256-128`."""
    return "-".join([kind, *map(str, (*channels, *hidden))])
