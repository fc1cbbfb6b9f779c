"""A split of a data set: images and labels as NumPy arrays on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples of one split."""

    images: UInt8[np.ndarray, "examples height width"]  # uint8 pixels, 0 to 255
    labels: Int[np.ndarray, " examples"]  # class of each example, int32; training and scoring use these
    true_labels: Int[np.ndarray, " examples"]  # class before label noise, int32; without noise, the corrected class
    given_labels: Int[np.ndarray, " examples"]  # class before corrections, int32
    # class after corrections, int32; equal to `labels` except in the test split
    corrected_labels: Int[np.ndarray, " examples"]
    example_id: Int[np.ndarray, " examples"]  # position in the original file, int32

    def __len__(self) -> int:
        return len(self.labels)
