"""A split of a data set: images and labels as NumPy arrays on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples of one split.

    Attributes:
        images: uint8 pixels, 0 to 255.
        labels: class of each example, int32; training and scoring use these.
        true_labels: class before label noise, int32; without noise, the corrected class.
        given_labels: class before corrections, int32.
        corrected_labels: class after corrections, int32; equal to `labels` except in the test split.
        example_id: position in the original file, int32.
    """

    images: UInt8[np.ndarray, "examples height width"]
    labels: Int[np.ndarray, " examples"]
    true_labels: Int[np.ndarray, " examples"]
    given_labels: Int[np.ndarray, " examples"]
    corrected_labels: Int[np.ndarray, " examples"]
    example_id: Int[np.ndarray, " examples"]

    def __len__(self) -> int:
        return len(self.labels)
