"""Diagnostics from gradients: class structure, curvature of the loss, and weights of checkpoints for influence.

The influence of a training example z on an example z' is that of TracIn: a step on z with learning rate η lowers the
loss of z' by about η ⟨∇ℓ(z), ∇ℓ(z')⟩; summed over a training, with kept weights for those of every step (Pruthi et al.,
arXiv 2002.08484, equation 1 and section 3.2). It is derived for plain gradient descent; other optimizers rescale steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.nn.models import HostParams, Params

Classes = Float[np.ndarray, "classes classes"]
_TINY = 1e-30  # below every norm but 0


@dataclass(frozen=True, kw_only=True)
class ClassStructure:
    """Similarity of the classes' gradients, float64; NaN if a class has no example, or no pair of examples."""

    cosine: Classes  # cosine between the mean gradients of two classes
    # mean inner product of the gradients of two distinct examples, one of each class, over the product of the
    # classes' root mean square norms: 1 if all are parallel, 0 if they are orthogonal on average
    coherence: Classes
    # ⟨Gc, G⟩ / ‖G‖² of the summed gradients of a class and of all examples: to first order, the share of the class in
    # the decrease of the summed loss by a gradient step. The shares sum to 1; that of a class whose gradient opposes
    # the sum, so that its own loss increases, is negative.
    share: Float[np.ndarray, " classes"]

    @classmethod
    def unknown(cls, num_classes: int) -> "ClassStructure":
        """Return the structure of an empty split: all NaN."""
        nothing = np.full((num_classes, num_classes), np.nan)
        return cls(cosine=nothing, coherence=nothing, share=nothing[0])

    @property
    def within(self) -> float:
        """Mean coherence of a class with itself; NaN if no class has two examples."""
        return _mean_of_finite(np.diag(self.coherence))

    @property
    def across(self) -> float:
        """Mean coherence of two distinct classes; NaN if there is only one."""
        return _mean_of_finite(self.coherence[~np.eye(len(self.coherence), dtype=bool)])


def class_structure(
    products: Classes, squares: Float[np.ndarray, " classes"], sizes: Int[np.ndarray, " classes"]
) -> ClassStructure:
    """Compute the similarity of the classes' gradients.

    Args:
        products: inner products of the classes' summed gradients, float64.
        squares: sum of the examples' squared gradient norms by class, float64.
        sizes: number of examples of each class.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.sqrt(np.diag(products))
        cosine = products / np.outer(norms, norms)
        pairs = np.outer(sizes, sizes) - np.diag(sizes)
        pairs = np.where(pairs > 0, pairs, np.nan)  # 0 / 0 would be infinite after rounding of the sums
        root_mean_square = np.sqrt(squares / sizes)
        coherence = (products - np.diag(squares)) / pairs / np.outer(root_mean_square, root_mean_square)
        share = np.sum(products, axis=1) / np.sum(products)
    return ClassStructure(cosine=cosine, coherence=coherence, share=share)


def _mean_of_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.mean(finite)) if len(finite) else np.nan


def hessian_product(grad: Callable[[Params], Params], params: Params, direction: Params) -> Params:
    """Return the Hessian at `params` times a direction: the derivative of the gradient along it.

    Forward over reverse mode (Pearlmutter, Neural Computation 6(1), 1994), at about twice the cost of a gradient.
    """
    return jax.jvp(grad, (params,), (direction,))[1]


def largest_eigenvalue(
    product: Callable[[HostParams], HostParams], params: Params | HostParams, iterations: int, *, seed: int
) -> float:
    """Return the Hessian's eigenvalue of largest magnitude, by power iteration on the host, in float64.

    Args:
        product: direction, float32 → Hessian times direction.
        params: parameters with the shapes of the direction.
        iterations: number of products; each reduces the error by the ratio of the two largest eigenvalues.
        seed: seed of the first direction, which is drawn from a normal distribution.
    """
    rng = np.random.default_rng(seed)
    direction = _unit(jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params))
    eigenvalue = 0.0
    for _ in range(iterations):
        along = product(direction)
        eigenvalue = _dot(direction, along)
        direction = _unit(along)
    return eigenvalue


def _unit(direction: HostParams) -> HostParams:
    norm = max(np.sqrt(_dot(direction, direction)), _TINY)
    return jax.tree.map(lambda leaf: (leaf / norm).astype(np.float32), direction)


def _dot(left: HostParams, right: HostParams) -> float:
    """Return the inner product; `np.sum` adds in one order, a BLAS in one that depends on its threads."""
    products = jax.tree.map(lambda a, b: np.sum(np.multiply(a, b, dtype=np.float64)), left, right)
    return float(sum(jax.tree.leaves(products)))


def checkpoint_weights(
    epochs: Sequence[int], learning_rates: Float[np.ndarray, " steps"], steps_per_epoch: int
) -> Float[np.ndarray, " checkpoints"]:
    """Return the weight of each kept epoch: the sum of the learning rates of the steps nearest to it.

    Args:
        epochs: epochs of the kept weights, ascending; 0 is before training.
        learning_rates: learning rate of every step of the training.
    """
    middle = (np.arange(len(learning_rates)) + 0.5) / steps_per_epoch  # middle of each step, in epochs
    nearest = np.argmin(np.abs(middle[:, None] - np.asarray(epochs, float)[None]), axis=1)
    return np.bincount(nearest, weights=learning_rates.astype(np.float64), minlength=len(epochs))
