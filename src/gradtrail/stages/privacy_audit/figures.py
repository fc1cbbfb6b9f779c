"""The figure of a privacy audit: the scores of canaries in and outside of the training set, and the bounds."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradtrail.stages.artifacts import plotting
from gradtrail.stages.privacy_audit.auditing import Audit

_BINS = 40


def draw(folder: Path, audit: Audit, title: str) -> None:
    """Write `privacy_audit.png`."""
    plotting.save(draw_audit(audit, title), folder / "privacy_audit.png")


def draw_audit(audit: Audit, title: str) -> Figure:
    """Draw the histogram of the scores, and the lower bound against the number of guesses with the claimed epsilon."""
    figure, axes = plotting.new_figure(f"Privacy audit · {title}", columns=2, size=(11, 4.2))
    _draw_scores(axes[0, 0], audit)
    _draw_bounds(axes[0, 1], audit)
    return figure


def _draw_scores(axis: Axes, audit: Audit) -> None:
    low, high = np.quantile(audit.scores, [0.002, 0.998])
    edges = np.linspace(low, max(high, low + 1e-9), _BINS + 1).tolist()
    clipped = np.clip(audit.scores, edges[0], edges[-1])
    for coin, label, colour in ((False, "not in the training set", plotting.GREY), (True, "in it", plotting.BLUE)):
        count = int((audit.coins == coin).sum())
        axis.hist(clipped[audit.coins == coin], edges, color=colour, alpha=0.55, label=f"{count:,} {label}")
    axis.set(xlabel="score: log-likelihood ratio of having been in batches", ylabel="canaries", title="Canaries")
    axis.legend(loc="upper right")


def _draw_bounds(axis: Axes, audit: Audit) -> None:
    guesses = [one.guesses for one, _ in audit.by_share]
    bounds = [bound for _, bound in audit.by_share]
    claimed = f"claimed by the accountant: {audit.claim.epsilon:.2f}"
    axis.axhline(audit.claim.epsilon, color=plotting.VERMILLION, linewidth=1.5, label=claimed)
    axis.plot(guesses, bounds, color=plotting.BLUE, marker="o", markersize=4, linewidth=1, label="by number of guesses")
    chosen = f"lower bound, {audit.guesses.correct:,} of {audit.guesses.guesses:,} right: {audit.lower_bound:.2f}"
    axis.plot([audit.guesses.guesses], [audit.lower_bound], "o", color=plotting.BLUE, markersize=9, label=chosen)
    axis.set_xscale("log")
    axis.set_ylim(0, 1.35 * max(audit.claim.epsilon, *bounds, audit.lower_bound))
    axis.set(
        xlabel="canaries that were guessed",
        ylabel=f"ε at δ = {audit.claim.delta:g}",
        title=f"What guessing proves, with {audit.confidence:.0%} confidence",
    )
    axis.legend(loc="upper left", fontsize=9)
