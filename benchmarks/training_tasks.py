"""What the processes of `benchmarks.training` agree on: networks, data and optimizers.

Loads no library but NumPy, so that each process loads its own alone.
"""

import argparse
import os
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

ModelName = Literal["mlp", "cnn", "resnet"]
Precision = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["adam", "adamw", "muon"]
Processor = Literal["any", "native"]

IMAGE_SHAPE, NUM_CLASSES = (28, 28), 10  # height and width in pixels, of color images also the number of channels
HIDDEN = {"mlp": (256, 128), "cnn": (128,)}  # the networks are written out once more for each library
CHANNELS, KERNEL_SIZE = (32, 64), 3
PATCH: Literal[4] = 4
STAGES, GROUPS = (64, 128, 256), 8  # of the residual network, with one block in each stage
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1  # weight decay is of AdamW and Muon


@dataclass(frozen=True, kw_only=True)
class Task:
    """One way to train one network, by a process of its own."""

    loop: Literal["lesson", "without_jit", "pytorch", "ours", "bare"]  # `bare` keeps no records
    model: ModelName
    batch_size: int
    examples: int  # in a round, a whole number of batches
    image_shape: tuple[int, ...] = IMAGE_SHAPE
    precision: Precision = "float32"
    compiles: bool = False  # by `torch.compile`
    channels_last: bool = False  # PyTorch's memory format, of a convolutional network
    optimizer: Optimizer = "adam"  # of `ours`; the others have Adam
    processor: Processor = "any"  # `environment.processor` of `ours`; the others have XLA's defaults

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that the loop needs, other than this project's."""
        return ("torch",) if self.loop == "pytorch" else ()

    @property
    def steps(self) -> int:
        """Optimizer steps of a round."""
        return self.examples // self.batch_size


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


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
