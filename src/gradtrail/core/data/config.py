"""Config of augmentations and deformations; imports no JAX, which reading params does not need."""

import dataclasses
from dataclasses import dataclass

from gradtrail.core.common.validation import NOT_NEGATIVE, SHARE, check_fields


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Ranges of the random changes; each is drawn uniformly between the negative and the positive value."""

    shift: float  # translation along both axes, in pixels
    rotation: float  # angle about the centre, in degrees
    scale: float  # relative change of size; 0.1 for 90 % to 110 %
    shear: float  # slant of the rows, in degrees
    # side of a square that is set to 0, in pixels (DeVries and Taylor, arXiv 1708.04552); its centre is uniform over
    # the image
    cutout: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            shift=NOT_NEGATIVE,
            rotation={"at_least": 0, "at_most": 180},
            scale=SHARE,
            shear={"at_least": 0, "below": 90},
            cutout=NOT_NEGATIVE,
        )

    @property
    def moves(self) -> bool:
        """Whether any geometric change is configured."""
        return bool(self.shift or self.rotation or self.scale or self.shear)

    @property
    def enabled(self) -> bool:
        """Whether any change is configured."""
        return any(dataclasses.astuple(self))
