"""How the gradients of the classes go together; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

Classes = Float[np.ndarray, "classes classes"]


@dataclass(frozen=True, kw_only=True)
class ClassStructure:
    """The mean gradients of the classes, beside each other; NaN where a class has no example.

    Attributes:
        cosine: between the mean gradients of two classes.
        coherence: mean inner product of the gradients of two different examples, one of each class, over the product
            of the classes' root mean square norms: 1 where all point one way, 0 where they have nothing in common.
        share: part of each class in the mean gradient of all, ⟨Gc, G⟩ / ‖G‖², by size of the class; they sum to 1, and
            a class that pulls against the rest has a negative one.
    """

    cosine: Classes
    coherence: Classes
    share: Float[np.ndarray, " classes"]

    @property
    def within(self) -> float:
        """Mean coherence of a class with itself."""
        return float(np.nanmean(np.diag(self.coherence)))

    @property
    def across(self) -> float:
        """Mean coherence of two different classes."""
        others = ~np.eye(len(self.coherence), dtype=bool)
        return float(np.nanmean(self.coherence[others])) if np.isfinite(self.coherence[others]).any() else 0.0


def class_structure(
    products: Classes, squares: Float[np.ndarray, " classes"], sizes: Int[np.ndarray, " classes"]
) -> ClassStructure:
    """Sum up the classes.

    Args:
        products: inner products of the classes' summed gradients, float64.
        squares: sum over each class's examples of their gradients' squared norms.
        sizes: examples of each class.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.sqrt(np.diag(products))
        cosine = products / np.outer(norms, norms)
        pairs = np.outer(sizes, sizes) - np.diag(sizes)
        root_mean_square = np.sqrt(squares / sizes)
        coherence = (products - np.diag(squares)) / pairs / np.outer(root_mean_square, root_mean_square)
        share = np.sum(products, axis=1) / np.sum(products)
    return ClassStructure(cosine=cosine, coherence=coherence, share=share)
