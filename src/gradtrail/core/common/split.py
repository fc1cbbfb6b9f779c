"""Examples with their labels; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples of one split.

    Attributes:
        images: pixels, 0 to 255.
        labels: the given class of each, int32: what training and scoring use.
        true_labels: the class before noise was injected; equal to `labels` where none was.
        example_id: position in the original file, int32.
    """

    images: UInt8[np.ndarray, "examples height width"]
    labels: Int[np.ndarray, " examples"]
    true_labels: Int[np.ndarray, " examples"]
    example_id: Int[np.ndarray, " examples"]

    def __len__(self) -> int:
        return len(self.labels)
