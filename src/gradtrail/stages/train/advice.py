"""A sensible start for a data set other than MNIST, for which the defaults of `params.yaml` were chosen."""

import shlex

from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.params import as_options
from gradtrail.stages.data.data_files import DatasetInfo

_KNOWN = ("mnist", "digits")
_STEPS = 8_000  # of the optimizer: 20 epochs of CIFAR-10, after which this network gains little
_EPOCHS = (10, 100)  # fewest and most
_CHANNELS = 32, 64, 128, 128, 128
_LAST_SIDE = 8  # about the pixels of a side after the last pooling; more make the dense layer most of the network


def sensible_start(config: TrainConfig, info: DatasetInfo) -> str:
    """Return a line with params to start from; empty for MNIST, and if the params have another network than a MLP."""
    if info.name in _KNOWN or config.model.kind not in ("mlp", "linear") or config.privacy.enabled:
        return ""
    height, width, *channels = info.image_shape
    changes: dict[str, object] = {"train.model": "cnn"}

    # A stack of convolutions halves the sides
    stacks = 2
    while stacks < len(_CHANNELS) and max(height, width) >> stacks > _LAST_SIDE:
        stacks += 1
    if stacks > 2:
        changes["train.cnn.channels"] = list(_CHANNELS[:stacks])

    # A small data set needs more epochs for as many steps; to the next multiple of 5
    epochs = _STEPS * config.batch_size / info.examples["train"]
    changes["train.epochs"] = min(max(5 * round(epochs / 5), _EPOCHS[0]), _EPOCHS[1])
    kind = "color" if channels else "grayscale"
    options = shlex.join(as_options(changes))
    return f"train: {info.name} has {kind} images of {height} × {width}; a sensible start is {options}"
