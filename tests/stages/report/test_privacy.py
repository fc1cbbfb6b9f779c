"""The parts of the report on a private training; a public one has none."""

import json
import re
from pathlib import Path

from report_folder import METRICS, TABLES, load_params, render, write_metrics
from stage_results import a_guarantee

from gradtrail.stages.artifacts.privacy import NOT_COVERED, PrivacyGuarantee, write_guarantee
from gradtrail.stages.report import inputs
from gradtrail.stages.report.sections.privacy import privacy_sections

EPSILONS = (1.25, 2.96)
EPOCHS = [line.split(",") for line in TABLES["train/epochs"].splitlines()]


def private(folder: Path, guarantee: PrivacyGuarantee) -> Path:
    """Make the folder that of a private training; without what one to publish leaves out."""
    blank = ["", "", ""] if guarantee.release else None
    rows = [
        [row[0], *(blank or row[1:4]), *row[4:], str(epsilon)]
        for row, epsilon in zip(EPOCHS[1:], EPSILONS, strict=True)
    ]
    lines = [[*EPOCHS[0], "epsilon"], *rows]
    (folder / "results/train/epochs.csv").write_text("\n".join(map(",".join, lines)))
    write_guarantee(folder / "results/train", guarantee)
    if guarantee.release:
        hide(folder)
    params = load_params(folder)
    params["train"]["privacy"] |= {"enabled": True, "secret_sha256": "0" * 64 if guarantee.has_secret else None}
    params["train"]["privacy"] |= {"release": guarantee.release}
    (folder / "params.yaml").write_text(json.dumps(params))
    return folder


def hide(folder: Path) -> None:
    """Remove what `train` and `gradients` leave out where a training is to be published."""
    write_metrics(folder, "train", {key: value for key, value in METRICS["train"].items() if key != "accuracy"})
    public = ("num_examples", "validation_grad_norm_median", "test_grad_norm_median")
    write_metrics(folder, "gradients", {key: METRICS["gradients"][key] for key in public})
    for name in ("noise_scale", "classes", "influence"):
        path = folder / f"results/gradients/{name}.csv"
        path.write_text(path.read_text().splitlines()[0])
    for name in ("course", "classes", "influence", "suspects_train"):
        (folder / f"results/gradients/{name}.png").unlink()
    suspects = folder / "results/gradients/suspects.csv"
    suspects.write_text("\n".join(line for line in suspects.read_text().splitlines() if not line.startswith("train")))


def test_report_of_public_training_does_not_mention_privacy(folder: Path) -> None:
    assert privacy_sections(inputs.read_sources(folder)) == []
    page = render(folder)
    assert 'href="#privacy"' not in page
    assert "epsilon" not in re.sub(r"<code>[^<]*</code>", "", page), "outside of the params"


def test_report_of_private_training_has_epsilon_curve_and_warnings(folder: Path) -> None:
    page = render(private(folder, a_guarantee(epsilon=2.96, has_secret=False)))
    assert "Private training: epsilon 2.96 at delta 1e-05." in page
    assert '<li><a href="#privacy">Privacy</a></li>' in page
    assert 'aria-label="Epsilon by PLD by epoch: 1.25 to 2.96, at delta 1e-05."' in page
    for message in ("add", "does not cover", "drawn from the seed", "threefry", "digests of the data"):
        assert message in page, message
    assert page.count(NOT_COVERED) == 4, "above the examples, the training, the data and the gradients"
    facts = dict(privacy_sections(inputs.read_sources(folder))[0].tables[0].rows)
    assert facts["noise multiplier"] == "1.5"
    assert facts["chance to be in a batch (Poisson sampling)"] == "10.000%"
    assert facts["steps"] == "30"


def test_training_to_publish_shows_nothing_of_its_examples(folder: Path) -> None:
    images, samples = 'alt="train example', 'alt="The first of'  # of the gallery, of the data
    assert images in render(folder)
    assert samples in render(folder)
    page = render(private(folder, a_guarantee(release=True)))
    assert "nothing on this page was computed from training examples without noise." in page
    assert NOT_COVERED not in page
    left_out = ("training accuracy over the last epoch", "standard deviation of", "nan", ">training<", "noise scale in")
    for message in (images, samples, *left_out):
        assert message not in page, message
    assert "The validation accuracy at the end of the last epoch is 98.54%." in page
