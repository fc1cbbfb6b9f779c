"""The parts of the report on a private training: its guarantee, what it covers, and what not."""

from gradtrail.stages.artifacts.privacy import NOT_COVERED, PrivacyGuarantee
from gradtrail.stages.report.charts import Chart, Series, Stop
from gradtrail.stages.report.components import Section, Table, count, percent
from gradtrail.stages.report.inputs import Sources

_EPSILON = "epsilon"
_PROTECTED = (
    "Epsilon bounds what anybody who has the weights, those of all kept epochs included, can find out about whether a "
    "single example was among the training examples: its pixels and its label together. Whatever they look for, adding "
    "or removing one training example changes its probability by at most a factor of e to the power of epsilon, up to "
    "delta."
)
_NOT_PROTECTED = (
    "It does not cover: the choice of params, or of weights (the best epoch, an early end), by results on the same "
    "data; the validation split; scores, images and learning dynamics of single training examples; training loss and "
    "training accuracy; how many examples a label has; and the digests of the data."
)
_KNOWN = (
    "Batches and noise were drawn from the seed. Whoever knows the seed can take the noise off again, so these weights "
    "protect nobody from them: train.privacy.secret_sha256 draws both from a secret."
)
_HIDDEN = "Batches and noise were drawn from a secret, which no file has; who knows it can take the noise off again."
_GENERATOR = (
    "JAX's generator of random numbers, threefry, is not a cryptographic one, and noise and sums are rounded to "
    "float32; epsilon counts neither."
)
_PUBLISHED = "Where something was computed from training examples without noise, the outs and this page leave it out."


def is_redacted(sources: Sources) -> bool:
    """Whether the outputs leave out everything that was computed from training examples without noise."""
    return sources.guarantee is not None and sources.guarantee.release


def warning(sources: Sources) -> str:
    """Return the warning above content that the guarantee does not cover; empty if there is none."""
    return NOT_COVERED if sources.guarantee is not None and not sources.guarantee.release else ""


def headline(sources: Sources) -> str:
    """Return a sentence on a private training for the first screen; empty for one that is not private."""
    guarantee = sources.guarantee
    if guarantee is None:
        return ""
    covered = (
        "But for digests and sizes of the data, nothing on this page was computed from training examples without noise."
        if guarantee.release
        else "What this page shows of training examples is not covered by it."
    )
    return f"Private training: epsilon {guarantee.epsilon:.3g} at delta {guarantee.delta:g}. {covered}"


def privacy_sections(sources: Sources) -> list[Section]:
    """Return the section on privacy; none if the training is not private."""
    if sources.guarantee is None:
        return []
    return [
        Section(
            id="privacy",
            title="Privacy",
            text=_words(sources.guarantee),
            tables=(_facts(sources.guarantee),),
            charts=(_curve(sources, sources.guarantee),),
        )
    ]


def _words(guarantee: PrivacyGuarantee) -> list[str]:
    words = [_PROTECTED, _NOT_PROTECTED]
    if guarantee.release:
        words.append(_PUBLISHED)
    if guarantee.members > 1:
        words.append(
            f"The {count(guarantee.members)} networks compose: each has an epsilon of at most "
            f"{guarantee.epsilon_each:.3g} by itself, and whoever sees all of them, or their ensemble, an epsilon of "
            f"{guarantee.epsilon:.3g}."
        )
    return [*words, _HIDDEN if guarantee.has_secret else _KNOWN, _GENERATOR]


def _facts(guarantee: PrivacyGuarantee) -> Table:
    several = guarantee.members > 1
    rows = [
        ("epsilon, by privacy loss distributions (PLD)", f"{guarantee.epsilon:.4g}"),
        ("epsilon, by Rényi differential privacy (RDP)", f"{guarantee.epsilon_rdp:.4g}"),
        *([("epsilon of one network, by PLD", f"{guarantee.epsilon_each:.4g}")] if several else []),
        ("delta", f"{guarantee.delta:g}"),
        ("noise multiplier", f"{guarantee.noise_multiplier:.4g}"),
        ("clip norm of an example", f"{guarantee.example_clip_norm:g}"),
        ("chance to be in a batch (Poisson sampling)", percent(guarantee.rate, 3)),
        ("mean size of a batch", count(guarantee.batch_size)),
        (f"steps{' of all networks' if several else ''}", count(guarantee.steps)),
    ]
    if guarantee.augmentation_multiplicity > 1:
        rows.append(("augmentations of an example", count(guarantee.augmentation_multiplicity)))
    return Table(caption="Accounting: upper bounds for adding or removing one example", header=("", "value"), rows=rows)


def _curve(sources: Sources, guarantee: PrivacyGuarantee) -> Chart:
    table = sources.table("train/epochs")
    points = list(zip(table.numbers("epoch"), table.numbers(_EPSILON), strict=True))
    whose = "of one network" if guarantee.members > 1 else "by PLD"
    ends = f"{points[0][1]:.3g} to {points[-1][1]:.3g}" if points else "there was no epoch"
    return Chart(
        id=_EPSILON,
        title="Epsilon",
        alt=f"Epsilon {whose} by epoch: {ends}, at delta {guarantee.delta:g}.",
        x_label="epoch",
        series=[Series(name=f"epsilon {whose}", style="model", points=points)],
        stops=[Stop(x=x, lines=[f"epoch {x:g}", f"epsilon: {y:.4g}"]) for x, y in points],
    )
