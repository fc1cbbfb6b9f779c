"""What if a training example had not been there? Outputs to ask about, and whether their changes can be predicted.

The prediction is the derivative of `metagradient`, to first order. It holds only if the training is smooth in the
weights of its examples, which is measured first, by training again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradtrail.core import batching
from gradtrail.core.config import MAX_GALLERY, Bounds, ConfigError, Count, CountOrZero, config
from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Outputs
from gradtrail.core.gradients.scores import correlation, rank_correlation
from gradtrail.core.intervals import TAILS, Interval
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import Model, Params

SMOOTH = 0.9  # metasmoothness from which the derivative predicts a retraining
_MAX_TEST_EXAMPLES = MAX_GALLERY // 10


@config
class WhatIfConfig:
    """The params of `make what-if`; the training is that of the section `train`."""

    # `example_id` of the test examples whose margins are predicted; empty for mistakes spread over all margins
    test_examples: tuple[CountOrZero, ...]
    num_examples: Annotated[int, Bounds(at_least=1, at_most=_MAX_TEST_EXAMPLES)]  # number of them if it is empty
    memory_mib: Count  # memory for the derivative; with less, the training is run in parts of another length

    def check(self) -> None:
        Bounds(at_most=_MAX_TEST_EXAMPLES).check("test_examples: number of them", len(self.test_examples))
        if len({*self.test_examples}) < len(self.test_examples):
            raise ValueError(f"test_examples must name each example once, got {[*self.test_examples]}")


def positions_of(names: Sequence[int], test: Split, key: str) -> Int[np.ndarray, " names"]:
    """Return the positions of test examples from each `example_id`; `key` names the param in the error.

    Raises:
        ConfigError: the test split has no such example; one line.
    """
    positions = {int(name): position for position, name in enumerate(test.example_id)}
    for name in names:
        if name not in positions:
            raise ConfigError(
                f"{key}: no example {name} in the test split, which has {len(test)} "
                f"of {test.example_id.min()} to {test.example_id.max()}"
            )
    return np.array([positions[name] for name in names], np.int64)


def make_outputs(model: Model, test: Split, validation: Split, batch_size: int) -> Outputs:
    """Return the function from parameters to the margin of each example of `test` and the mean validation loss.

    The loss is a sum over batches, whose activations are computed again for its derivative.
    """
    shape = batching.num_batches(len(validation), batch_size), batch_size
    rows = np.resize(np.arange(len(validation)), shape)  # padding repeats the first rows
    weights = (np.arange(rows.size) < len(validation)).reshape(shape).astype(np.float32) / len(validation)
    batches = validation.images[rows], validation.labels[rows], weights
    outputs: Outputs = jax.tree_util.Partial(functools.partial(_outputs, model), test.images, test.labels, batches)
    return outputs


def _outputs(
    model: Model, images: Array, labels: Array, batches: tuple[Array, Array, Array], params: Params
) -> Float[Array, " outputs"]:
    @jax.checkpoint
    def add_batch(total: Array, batch: tuple[Array, Array, Array]) -> tuple[Array, None]:
        images, labels, weights = batch
        return total + jnp.sum(weights * losses.cross_entropy(model.apply(params, images), labels)), None

    loss, _ = jax.lax.scan(add_batch, jnp.float32(0), batches)
    return jnp.append(losses.log_odds(model.apply(params, images), labels), loss)


def metasmoothness(
    start: Float[np.ndarray, " tests"],
    margins_after: Callable[[Float[np.ndarray, "examples classes"]], Float[np.ndarray, " tests"]],
    subsets: Sequence[Float[np.ndarray, "examples classes"]],
) -> float:
    """Return how equal the effects of two equal changes of the weights are: 1 if equal, about 0 in a chaotic training.

    Let m(t) be the margins of the test examples after a training with t times the changes of a subset. The result is
    the correlation over the test examples of m(1/2) - m(0) and m(1) - m(1/2), mean over the subsets. Source: the
    empirical metasmoothness of arXiv 2503.13751, with a correlation in place of its agreement of signs.

    Args:
        start: m(0).
        margins_after: changes of the weights, as in `Examples` → margins after a training with them.
        subsets: changes of each subset.
    """
    correlations = []
    for changes in subsets:
        half, whole = (margins_after(np.float32(share) * changes).astype(np.float64) for share in (0.5, 1.0))
        correlations.append(correlation(half - start.astype(np.float64), whole - half))
    return float(np.mean(correlations))


def measure_lds(
    predicted: Float[np.ndarray, "subsets outputs"],
    real: Float[np.ndarray, "subsets outputs"],
    resamples: int = 1000,
) -> tuple[list[float], Interval]:
    """Return the linear datamodeling score of each output, and the mean with its interval by bootstrap over subsets.

    It is Spearman's correlation of predicted and real changes over random subsets of the data. Source: Park et al.,
    "TRAK: Attributing model behavior at scale" (arXiv 2303.14186).
    """

    def correlations(rows: Int[np.ndarray, " subsets"]) -> list[float]:
        return [rank_correlation(predicted[rows, output], real[rows, output]) for output in range(real.shape[1])]

    by_output = correlations(np.arange(len(real)))
    draws = np.random.default_rng(0).integers(len(real), size=(resamples, len(real)))
    low, high = np.quantile([np.mean(correlations(rows)) for rows in draws], TAILS)
    return by_output, Interval(value=float(np.mean(by_output)), low=float(low), high=float(high))
