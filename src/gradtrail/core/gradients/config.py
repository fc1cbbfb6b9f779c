"""The section `gradients` of `params.yaml`: the analysis of per-example gradients."""

from dataclasses import dataclass

from gradtrail.core.common.validation import NOT_NEGATIVE, check, check_fields
from gradtrail.core.config import MAX_GALLERY
from gradtrail.core.nn.models import WeightsKind


@dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """The section `gradients`."""

    weights: WeightsKind  # weights of the last epoch, or of the one with the best validation accuracy
    top_fraction: float  # share of a split that counts as the largest gradients
    num_largest: int  # number of images in the gallery of the largest gradients
    num_suspects: int  # number of images in each gallery of suspected label errors
    num_influenced: int  # number of test examples whose influences are computed if `test_examples` is empty
    bootstrap_samples: int  # number of bootstrap samples for the interval of the noise scale
    curvature_iterations: int  # number of power iterations for the largest eigenvalue of the Hessian; 0 to skip it
    # `example_id` of the test examples whose influences are computed; empty for those with the largest loss
    test_examples: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(
            self,
            top_fraction={"above": 0, "at_most": 1},
            num_largest={"at_least": 1, "at_most": MAX_GALLERY},
            num_suspects={"at_least": 1, "at_most": MAX_GALLERY},
            num_influenced={"at_least": 1, "at_most": MAX_GALLERY // 10},
        )
        check("test_examples: number of them", len(self.test_examples), at_least=0, at_most=MAX_GALLERY // 10)
        check_fields(
            self,
            bootstrap_samples={"at_least": 100, "at_most": 100_000},
            curvature_iterations={"at_least": 0, "at_most": 10_000},
            test_examples=NOT_NEGATIVE,
        )
