"""What the report shows of the gradients: the words of the stage itself, its pictures, and its noise scales."""

import math

from gradtrail.stages.report.components import Picture, Section, Table, count, percent
from gradtrail.stages.report.inputs import Sources


def gradients_section(sources: Sources) -> Section:
    """Show what `summary.md` says, and the pictures that it speaks of."""
    pictures = (
        *(_histograms(sources), _relations(sources), _largest(sources)),
        *(_suspects(sources, split) for split in dict.fromkeys(sources.table("gradients/suspects").text("split"))),
        *(_course(sources), _classes(sources), _influence(sources), *_detection(sources)),
    )
    return Section(
        id="gradients",
        title="Gradients",
        text=(
            f"Each of {count(sources.figure('gradients', 'num_examples'))} examples has a gradient of its own; this is "
            "what they say of the examples and of the training.",
        ),
        markdown=sources.summary,
        tables=(_noise_table(sources),),
        pictures=pictures,
    )


def typical_noise(sources: Sources) -> float:
    """Return the typical noise scale, in examples; infinity where none could be measured."""
    key = "noise_scale_typical"
    return sources.figure("gradients", key) if key in sources.metrics["gradients"] else math.inf


def examples(number: float) -> str:
    """Write a noise scale; it is beyond measure where the mean gradient is drowned in noise."""
    return count(number) if math.isfinite(number) else "beyond measure"


def _noise_table(sources: Sources) -> Table:
    table = sources.table("gradients/noise_scale")
    columns = [[examples(value) for value in table.numbers(name)] for name in ("noise_scale", "low", "high")]
    return Table(
        caption="Gradient noise scale at each kept epoch, in examples",
        header=("epoch", "noise scale", "from", "to"),
        rows=list(zip(table.text("epoch"), *columns, strict=True)),
    )


def _histograms(sources: Sources) -> Picture:
    medians = {
        split: sources.figure("gradients", f"{prefix}grad_norm_median")
        for split, prefix in (("training", ""), ("validation", "validation_"), ("test", "test_"))
    }
    named = ", ".join(f"{value:.3g} in the {split} split" for split, value in medians.items())
    return Picture(
        png=sources.picture("gradients/histograms"),
        caption="Norms of single gradients, by split and by whether the prediction is right",
        alt=f"Histograms of the gradient norm, by split and by whether the prediction is right. The median is {named}.",
    )


def _relations(sources: Sources) -> Picture:
    names = {"loss": "the loss", "margin": "the margin", "input_norm": "the norm of the image"}
    found = {name: sources.figure("gradients", f"rank_correlation_{key}") for key, name in names.items()}
    said = ", ".join(f"{value:+.2f} with {name}" for name, value in found.items())
    return Picture(
        png=sources.picture("gradients/relations"),
        caption="What large gradients go with: a point for each example",
        alt=f"The gradient norm over loss, margin and norm of the image. The rank correlation is {said}.",
    )


def _largest(sources: Sources) -> Picture:
    table = sources.table("gradients/largest")
    columns = (table.text(name) for name in ("split", "example_id", "label", "predicted"))
    norms = [f"{value:.1f}" for value in table.numbers("grad_norm")]
    first = [
        f" The first is {split} #{example}, a {label} predicted {predicted}, with a norm of {norm}."
        for split, example, label, predicted, norm in zip(*columns, norms, strict=True)
    ]
    return Picture(
        png=sources.picture("gradients/largest"),
        caption="Largest gradients: label → prediction, and the norm",
        alt=f"Images of the {len(table.rows)} examples with the largest gradients.{''.join(first[:1])}",
    )


def _suspects(sources: Sources, split: str) -> Picture:
    table = sources.table("gradients/suspects")
    columns = (table.text(name) for name in ("split", "example_id", "label", "predicted"))
    found = [row[1:] for row in zip(*columns, strict=True) if row[0] == split]
    first = [f" The first is #{example}, given {label}, predicted {other}." for example, label, other in found[:1]]
    return Picture(
        png=sources.picture(f"gradients/suspects_{split}"),
        caption=f"Labels of the {split} split that look wrong: given → predicted, and how probable the given one is",
        alt=f"Images of the {len(found)} examples of the {split} split whose labels look wrong.{''.join(first)}",
    )


def _course(sources: Sources) -> Picture:
    table = sources.table("gradients/noise_scale")
    points = zip(table.numbers("noise_scale"), table.text("epoch"), strict=True)
    named = ", ".join(f"{examples(value)} at epoch {epoch}" for value, epoch in points)
    return Picture(
        png=sources.picture("gradients/course"),
        caption="Gradients over the training: noise scale, and how alike the rankings are",
        alt=f"The noise scale over the epochs, {named}; and how the ranking by gradient norm changes.",
    )


def _classes(sources: Sources) -> Picture:
    table = sources.table("gradients/classes")
    shares = sorted(zip(table.numbers("share"), table.text("class"), strict=True))
    ends = [f"class {name} holds {percent(share, 0)}" for share, name in (shares[-1:] + shares[:1])]
    return Picture(
        png=sources.picture("gradients/classes"),
        caption="Gradients by class: red goes the same way, blue against",
        alt=(
            f"Cosine and coherence of the gradients of each two classes, and each class's share of the mean gradient: "
            f"{', '.join(ends)}."
        ),
    )


def _influence(sources: Sources) -> Picture:
    table = sources.table("gradients/influence")
    tests = list(dict.fromkeys(table.text("test_example")))
    return Picture(
        png=sources.picture("gradients/influence"),
        caption="Test examples, and the training examples that helped and hurt them most",
        alt=(
            f"Images of {len(tests)} test examples, #{', #'.join(tests)}, each with the training examples that helped "
            "and that hurt it most."
        ),
    )


def _detection(sources: Sources) -> tuple[Picture, ...]:
    """Return the picture of how wrong labels are found; none where no label was made wrong."""
    name = "gradients/label_error_scores"
    if name not in sources.pictures:
        return ()
    table = sources.table(name)
    best = list(zip(table.text("score"), table.numbers("average_precision"), strict=True))[:1]
    said = "".join(f" The best is {score}, with an average precision of {value:.3f}." for score, value in best)
    picture = Picture(
        png=sources.picture(name),
        caption="How well each score finds the labels that were made wrong",
        alt=f"Average precision and AUROC of {len(table.rows)} scores at finding the labels made wrong.{said}",
    )
    return (picture,)
