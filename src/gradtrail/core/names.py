"""The names of models, which weights, runs, figures and the report share."""

from collections.abc import Sequence
from pathlib import Path

NETWORKS = Path("pipeline/networks")  # folder of networks of one's own


def model_name(kind: str, *, channels: Sequence[int] = (), hidden: Sequence[int] = (), features: str = "none") -> str:
    """Return the name of a network from its kind, the widths of its layers and its features, such as `mlp-256-128`.

    Channels come before the hidden layers, after a plus: `cnn-16-32-64+128`. Features other than `none` end it: `linear
    on oriented gradients`.
    """
    widths = "+".join("-".join(map(str, layer_widths)) for layer_widths in (channels, hidden) if layer_widths)
    name = f"{kind}-{widths}" if widths else kind
    return name if features == "none" else f"{name} on {features.replace('_', ' ')}"
