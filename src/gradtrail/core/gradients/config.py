"""The section `gradients` of `params.yaml`."""

from dataclasses import dataclass

from gradtrail.core.common.validation import MAX_PICTURES, check
from gradtrail.core.nn.models import WeightsKind


@dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """What is asked of the gradients of single examples.

    Attributes:
        weights: of the last epoch, or of the one with the best validation accuracy.
        top_fraction: share of a split that counts as "the largest gradients".
        num_largest: in the gallery.
        num_suspects: in each gallery of suspected label errors.
        num_influenced: test examples whose influences are shown: the worst mistakes, where none are chosen.
        bootstrap_samples: for the interval of the noise scale.
        curvature_iterations: of the power iteration for the largest eigenvalue of the Hessian; 0 for none.
        test_examples: `example_id` of the test examples whose influences are shown; empty for the worst mistakes.
    """

    weights: WeightsKind
    top_fraction: float
    num_largest: int
    num_suspects: int
    num_influenced: int
    bootstrap_samples: int
    curvature_iterations: int
    test_examples: tuple[int, ...]

    def __post_init__(self) -> None:
        check("top_fraction", self.top_fraction, above=0, at_most=1)
        check("num_largest", self.num_largest, at_least=1, at_most=MAX_PICTURES)
        check("num_suspects", self.num_suspects, at_least=1, at_most=MAX_PICTURES)
        check("num_influenced", self.num_influenced, at_least=1, at_most=MAX_PICTURES // 10)
        check("test_examples: number of them", len(self.test_examples), at_least=0, at_most=MAX_PICTURES // 10)
        check("bootstrap_samples", self.bootstrap_samples, at_least=100)
        check("curvature_iterations", self.curvature_iterations, at_least=0)
        for example in self.test_examples:
            check("test_examples", example, at_least=0)
