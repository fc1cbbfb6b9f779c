"""For a training to publish, outputs of the gradients hold nothing of training examples; the rest is unchanged."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from factories import NUM_CLASSES, gradients_config, model_config, new_compiler, params_on_device, random_split
from stage_results import a_guarantee, learning_dynamics

from gradtrail.core.gradients.analysis import GradientAnalysis, Trajectory, analyze, num_visits
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.models import Model
from gradtrail.stages.dp.guarantee import REDACTED
from gradtrail.stages.gradients import figures, outputs, summary
from gradtrail.stages.gradients.inputs import DYNAMICS, scored_splits

SPLITS = {"train": random_split(30), "validation": random_split(6), "test": random_split(9)}
PUBLISHED = a_guarantee(release=True)
MODEL = Model(model_config())
TRAJECTORY = Trajectory(
    params={epoch: params_on_device(MODEL, epoch) for epoch in (0, 1)},
    scored=1,
    batch_size=5,
)
CONFIG = gradients_config()
OF_TRAINING = ("noise_scale", "classes")


@pytest.fixture(scope="module")
def analyses() -> tuple[GradientAnalysis, GradientAnalysis, list[int]]:
    """Of all examples, and of those that may be told of; and the visits that the latter took."""
    visits: list[int] = []
    passes = compile_passes(MODEL, CROSS_ENTROPY, compiler=new_compiler())
    whole = analyze(passes, TRAJECTORY, SPLITS, CONFIG, NUM_CLASSES)
    public_splits = scored_splits(SPLITS, PUBLISHED)
    part = analyze(
        passes, TRAJECTORY, public_splits, CONFIG, NUM_CLASSES, advance=lambda count, **_: visits.append(count)
    )
    return whole, part, visits


def test_only_a_training_to_publish_hides_its_examples() -> None:
    for guarantee in (None, a_guarantee()):
        assert scored_splits(SPLITS, guarantee) == SPLITS
    public_splits = scored_splits(SPLITS, PUBLISHED)
    assert {name: len(split) for name, split in public_splits.items()} == {"train": 0, "validation": 6, "test": 9}
    assert public_splits["train"].images.shape[1:] == SPLITS["train"].images.shape[1:]


def test_scores_of_other_splits_are_as_before(
    analyses: tuple[GradientAnalysis, GradientAnalysis, list[int]],
) -> None:
    whole, part, visits = analyses
    training_secret = {"alignment", "class_alignment"}  # cosines with the mean gradient of the training examples
    for split in ("validation", "test"):
        assert set(part.scores[split]) == set(whole.scores[split])
        for name, values in part.scores[split].items():
            if name in training_secret:
                assert np.isnan(values).all()
            else:
                np.testing.assert_array_equal(values, whole.scores[split][name])
    assert set(part.scores) == {"validation", "test"}
    assert part.noise_scales == {}
    assert sum(visits) == num_visits(TRAJECTORY, scored_splits(SPLITS, PUBLISHED))


def collected(scratch: Path, analysis: GradientAnalysis, *, release: bool) -> outputs.Results:
    public_splits = scored_splits(SPLITS, a_guarantee(release=release))
    dynamics = learning_dynamics(len(public_splits["train"]))
    assert {*dynamics} == {*DYNAMICS} - {"example_id"}
    scores = outputs.score_table(public_splits, analysis.scores, dynamics)
    num_train = len(public_splits["train"])
    return outputs.collect([(0, scores, analysis)], CONFIG, scratch, classes="abcdefghij", num_train=num_train)


def test_outs_to_publish_have_their_schema_and_no_training_example(
    analyses: tuple[GradientAnalysis, GradientAnalysis, list[int]], tmp_path: Path
) -> None:
    whole, part, _ = analyses
    for name, analysis in (("whole", whole), ("published", part)):
        results = collected(tmp_path, analysis, release=name == "published")
        results.write(tmp_path / name)
    figures.draw(tmp_path / "published", results, scored_splits(SPLITS, PUBLISHED), "a title", 5)
    schemas = [pq.read_schema(tmp_path / name / "scores.parquet") for name in ("whole", "published")]
    assert schemas[0].equals(schemas[1])
    scores = pd.read_parquet(tmp_path / "published/scores.parquet")
    assert set(scores["split"]) == {"validation", "test"}
    for name in (*OF_TRAINING, "norms", "splits", "largest", "suspects"):
        before, after = (pd.read_csv(tmp_path / folder / f"{name}.csv") for folder in ("whole", "published"))
        assert list(before) == list(after), name
        assert (len(after) == 0) == (name in OF_TRAINING), name
        assert "train" not in after.get("split", pd.Series(dtype=str)).tolist(), name
    assert pd.read_csv(tmp_path / "published/norms.csv")["train"].isna().all()
    drawn = {path.stem for path in (tmp_path / "published").glob("*.png")}
    assert drawn == {"histograms", "relations", "largest", "suspects_test"}


def test_metrics_and_words_to_publish_leave_the_training_split_out(
    analyses: tuple[GradientAnalysis, GradientAnalysis, list[int]], tmp_path: Path
) -> None:
    _, part, _ = analyses
    results = collected(tmp_path, part, release=True)
    metrics = results.metrics
    assert set(metrics) == {"num_examples", "validation_grad_norm_median", "test_grad_norm_median"}
    assert metrics["num_examples"] == 15
    words = summary.summarize("a title", results, CONFIG, 5, PUBLISHED)
    assert words.startswith(f"# Summary of per-example gradients: a title\n\n{REDACTED}\n\n## Suspected")
    assert "train split" not in words
    assert words.count("## ") == 1
