"""Canaries: examples that a fair coin puts into a training set or not; an audit guesses the coins from the training."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, UInt8

from gradtrail.core.data import Split

CanaryKind = Literal["dots", "mislabelled"]
_DARK, _DOTS = 2 / 5, 1 / 20  # shares of all pixels


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Examples that an audit guesses to be in a training set or not."""

    images: UInt8[np.ndarray, "canaries height width"]
    labels: Int[np.ndarray, " canaries"]  # int32

    def __len__(self) -> int:
        return len(self.labels)


def make_canaries(
    train: Split, kind: CanaryKind, count: int, num_classes: int, *, rng: np.random.Generator
) -> Canaries:
    """Draw canaries, none of which is an example of `train`; raise ValueError, one line, if it has too few examples.

    `dots` have one pixel in twenty white, at random where the training images are darkest, and a random label: large
    gradients, almost orthogonal to each other and to those of real images. `mislabelled` are training images with a
    random wrong label.
    """
    if kind == "mislabelled":
        if count > len(train):
            raise ValueError(
                f"num_canaries must be at most the number of training examples, {len(train):,}, got {count:,}"
            )
        rows = np.sort(rng.choice(len(train), count, replace=False))
        labels = (train.labels[rows] + rng.integers(1, num_classes, count)) % num_classes
        return Canaries(images=train.images[rows], labels=labels.astype(np.int32))
    brightness = np.mean(np.square(train.images, dtype=np.float32), axis=0).ravel()
    pixels = len(brightness)
    dark = np.argsort(brightness, kind="stable")[: max(2, round(_DARK * pixels))]
    places = rng.permuted(np.broadcast_to(dark, (count, len(dark))), axis=1)[:, : max(1, round(_DOTS * pixels))]
    images = np.zeros((count, pixels), np.uint8)
    np.put_along_axis(images, places, np.uint8(255), axis=1)
    labels = rng.integers(0, num_classes, count, dtype=np.int32)
    return Canaries(images=images.reshape(count, *train.images.shape[1:]), labels=labels)


def draw_membership(count: int, *, rng: np.random.Generator) -> Bool[np.ndarray, " canaries"]:
    """Return True for the canaries that are put into the training set, by independent fair coins."""
    return rng.integers(0, 2, count) == 1


def with_canaries(
    train: Split, canaries: Canaries
) -> tuple[UInt8[np.ndarray, "examples height width"], Int[np.ndarray, " examples"]]:
    """Return images and labels of a training split with all canaries at its end."""
    return np.concatenate([train.images, canaries.images]), np.concatenate([train.labels, canaries.labels])
