"""Suspicion scores of labels, from logits of networks that were not trained on the example; NumPy on the host.

Every score is larger for a more suspicious label.
"""

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core import evaluate
from gradtrail.core.evaluate import log_softmax

Logits = Float[np.ndarray, "networks examples classes"]
Labels = Int[np.ndarray, " examples"]

# Scores to choose from on planted noise; `grad_norm` is compared too, but exists for the given labels only
CANDIDATES = ("margin", "self_confidence", "el2n", "odds", "log_margin", "disagreement")
_SMALLEST = 1e-9  # probability below which logits are meaningless
_FITTED = 10_000  # most examples to fit a temperature on


def probabilities(logits: Logits, temperature: float) -> Float[np.ndarray, "networks examples classes"]:
    """Return the softmax of the logits over a temperature, float64."""
    return np.exp(log_softmax((logits / temperature).astype(np.float64)))


def fit_temperature(logits: Logits, labels: Labels) -> float:
    """Return the temperature of the networks, fitted on at most 10,000 examples that they were not trained on."""
    every = -(-len(labels) // _FITTED)
    return evaluate.fit_temperature(logits[:, ::every], labels[::every])


def label_scores(logits: Logits, labels: Labels, temperature: float) -> dict[str, Float[np.ndarray, " examples"]]:
    """Return the scores of labels, float64.

    Args:
        logits: logits by networks that were not trained on the examples.
        labels: label of each example to score; not necessarily the given one.

    Returns:
        `margin`, the largest mean probability of another class minus that of the label, -1 to 1 (Northcutt et al.,
        arXiv 1911.00068); `self_confidence`, one minus the label's mean probability; `el2n`, the mean over the networks
        of ‖p - onehot(label)‖₂ (Paul et al., arXiv 2107.07075); `log_margin`, the mean over the networks of the largest
        other logit minus that of the label (after Pleiss et al., arXiv 2001.10528, who take it over epochs);
        `disagreement`, the share of networks that predict another class; `odds`, the log of the odds that the label is
        wrong if half of the errors are uniform and half are the networks' own confusions, up to the error rate: of
        ½ (1 - p_y) / ((k - 1) p_y) + ½ Σ_{j ≠ y} p_j / (1 - p_j) with the mean probabilities p of k classes.
    """
    rows = np.arange(len(labels))
    is_label = np.arange(logits.shape[-1]) == labels[:, None]
    by_network = probabilities(logits, temperature)
    mean = by_network.mean(axis=0)
    other_logits = np.where(is_label, -np.inf, logits).max(axis=-1)
    certain = np.clip(mean, _SMALLEST, 1 - _SMALLEST)
    label_probability, other_probabilities = certain[rows, labels], np.where(is_label, 0, certain)
    confused = (other_probabilities / (1 - other_probabilities)).sum(axis=-1)
    margins = (other_logits.astype(np.float64) - logits[:, rows, labels]) / temperature
    return {
        "margin": np.where(is_label, -np.inf, mean).max(axis=-1) - mean[rows, labels],
        "self_confidence": np.where(is_label, 0, mean).sum(axis=-1),
        "el2n": np.sqrt(((by_network - is_label) ** 2).sum(axis=-1)).mean(axis=0),
        "odds": np.log(((1 - label_probability) / label_probability / (mean.shape[-1] - 1) + confused) / 2),
        "log_margin": margins.mean(axis=0),
        "disagreement": (margins > 0).mean(axis=0),
    }
