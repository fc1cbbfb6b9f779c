"""A sensible start for a data set other than MNIST, for which the defaults of `params.yaml` were chosen."""

import shlex

from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.params import as_options
from gradtrail.stages.data.data_files import DatasetInfo

_KNOWN = ("mnist", "digits")
_STEPS = 8_000  # of the optimizer: 20 epochs of CIFAR-10, after which these networks gain little
_EPOCHS = (10, 100)  # fewest and most
_CHANNELS = 32, 64, 128, 128, 128
_LAST_SIDE = 8  # about the pixels of a side after the last pooling; more make the dense layer most of the network
_LARGEST_SIDE = 56  # pixels of a side, or patches, that a residual network sees
_FEW, _SMALL_BATCH = 10_000, 32  # below so many training examples, smaller batches generalize better


def sensible_start(config: TrainConfig, info: DatasetInfo) -> str:
    """Return a line with params to start from; empty for MNIST, and if the params have another network than a MLP."""
    if info.name in _KNOWN or config.model.kind not in ("mlp", "linear") or config.privacy.enabled:
        return ""
    height, width, *channels = info.image_shape
    kind, count, batch_size = "color" if channels else "grayscale", info.examples["train"], config.batch_size
    changes: dict[str, object] = {"train.model": "resnet" if channels else "cnn"}
    if channels:
        largest = max(1, min(height, width) // 4)  # the stages halve what it leaves twice
        patches = [size for size in (1, 2, 4, 8) if height % size == width % size == 0 and size <= largest]
        patch = next((size for size in patches if max(height, width) <= _LARGEST_SIDE * size), patches[-1])
        changes |= {"train.resnet.patch": patch} if patch > 1 else {}
        changes |= {"train.normalization": "channels", "train.augmentation.flip": True}
        changes["train.augmentation.crop"] = min(height, width) // 10
        if count < _FEW:
            changes["train.batch_size"] = batch_size = _SMALL_BATCH
    else:  # a stack of convolutions halves the sides
        stacks = 2
        while stacks < len(_CHANNELS) and max(height, width) >> stacks > _LAST_SIDE:
            stacks += 1
        changes |= {"train.cnn.channels": list(_CHANNELS[:stacks])} if stacks > 2 else {}

    # A small data set needs more epochs for as many steps; to the next multiple of 5
    epochs = _STEPS * batch_size / count
    changes["train.epochs"] = min(max(5 * round(epochs / 5), _EPOCHS[0]), _EPOCHS[1])
    options = shlex.join(as_options(changes))
    return f"train: {info.name} has {kind} images of {height} × {width}; a sensible start is {options}"
