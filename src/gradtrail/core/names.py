"""The names of models, which weights, runs, figures and the report share."""

from collections.abc import Sequence
from pathlib import Path

NETWORKS = Path("pipeline/networks")  # folder of networks of one's own


def model_name(kind: str, *, channels: Sequence[int] = (), hidden: Sequence[int] = ()) -> str:
    """Return the name of a network from its kind and the widths of its layers, such as `mlp-256-128`.

    Channels come before the hidden layers, with a plus between: `cnn-16-32-64+128`.
    """
    widths = "+".join("-".join(map(str, layer_widths)) for layer_widths in (channels, hidden) if layer_widths)
    return f"{kind}-{widths}" if widths else kind
