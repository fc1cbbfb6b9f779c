"""What the processes of `benchmarks.training` agree on: networks, data, and what counts as the work of a step.

Loads no library but NumPy, so that each process loads its own alone.
"""

import argparse
import itertools
import math
import os
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

ModelName = Literal["mlp", "cnn"]
Precision = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["adam", "adamw", "muon"]
Processor = Literal["any", "native"]

IMAGE_SHAPE, NUM_CLASSES = (28, 28), 10  # height and width in pixels, of color images also the number of channels
HIDDEN = {"mlp": (256, 128), "cnn": (128,)}  # the networks are written out once more for each library
CHANNELS, KERNEL_SIZE = (32, 64), 3
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1  # weight decay is of AdamW and Muon


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train one network.

    Attributes:
        loop: `bare` keeps no records; `matmuls` is no training: the matrix products alone.
        compiles: whether by `torch.compile`.
        channels_last: PyTorch's memory format, of a convolutional network.
        optimizer: of `ours`; the others have Adam.
        processor: `environment.processor` of `ours`; the others have XLA's defaults.
    """

    loop: Literal["lesson", "pytorch", "ours", "bare", "matmuls"]
    model: ModelName
    batch_size: int
    precision: Precision
    compiles: bool = False
    channels_last: bool = False
    optimizer: Optimizer = "adam"
    processor: Processor = "any"


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a process.

    Attributes:
        examples: in a round, a whole number of batches.
        rounds: to time, after one that is not timed.
    """

    peer: Peer
    examples: int
    rounds: int
    image_shape: tuple[int, ...] = IMAGE_SHAPE

    @property
    def steps(self) -> int:
        """Optimizer steps of a round."""
        return self.examples // self.peer.batch_size


def image_shape(text: str) -> tuple[int, ...]:
    """Return the shape in an option such as `--images 32x32x3`; ArgumentTypeError if there is none."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, got {text!r}")
    return tuple(map(int, text.split("x")))


def suffix_of(shape: tuple[int, ...]) -> str:
    """Return the end of the names of results files for images of this shape, such as `-32x32x3`."""
    return "" if shape == IMAGE_SHAPE else f"-{'x'.join(map(str, shape))}"


def make_data(num_examples: int, shape: tuple[int, ...] = IMAGE_SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """Draw uint8 images and int32 labels, the same ones in every process."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, *shape), dtype=np.uint8)
    return images, rng.integers(0, NUM_CLASSES, num_examples, dtype=np.int32)


def matmul_shapes(
    model: ModelName, batch_size: int, shape: tuple[int, ...] = IMAGE_SHAPE
) -> list[tuple[int, int, int]]:
    """Return the matrix products of a step, forward and backward, as (rows, inner, columns).

    A convolution counts as the product of kernel and patches. The images need no gradient.
    """
    layers = []
    height, width, *channels = shape
    num_channels, num_pixels = math.prod(channels), height * width
    for num_outputs in CHANNELS if model == "cnn" else ():
        kernel, columns = KERNEL_SIZE**2 * num_channels, num_pixels * batch_size
        of_kernel, of_patches = (num_outputs, columns, kernel), (kernel, num_outputs, columns)
        layers.append(((num_outputs, kernel, columns), of_kernel, of_patches))
        height, width = height // 2, width // 2
        num_channels, num_pixels = num_outputs, height * width
    for width, num_outputs in itertools.pairwise((num_channels * num_pixels, *HIDDEN[model], NUM_CLASSES)):
        of_weights, of_inputs = (width, batch_size, num_outputs), (batch_size, num_outputs, width)
        layers.append(((batch_size, width, num_outputs), of_weights, of_inputs))
    first, *rest = layers
    return [*first[:2], *itertools.chain(*rest)]


def flops_per_step(model: ModelName, batch_size: int, shape: tuple[int, ...] = IMAGE_SHAPE) -> int:
    """Return the floating-point operations of these matrix products."""
    return sum(2 * rows * inner * columns for rows, inner, columns in matmul_shapes(model, batch_size, shape))


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
