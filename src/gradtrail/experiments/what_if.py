"""`gradtrail what-if`: predict what removing or relabeling training examples changes, retrain, and compare.

The stage `what_if` predicts, to first order. Each retraining is a DVC experiment up to the stage `train`, and a run as
any other; its outputs are those of its final weights, from DVC's cache. The LDS says how good the predictions are. Out
of scope: a training that is not metasmooth, for which the stage predicts nothing.
"""

import base64
import contextlib
import dataclasses
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from mlflow.entities import Run

from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import require_differentiable
from gradtrail.core.gradients.scores import largest
from gradtrail.core.gradients.what_if import WhatIfConfig, measure_lds, positions_of
from gradtrail.core.intervals import Interval
from gradtrail.core.nn import inference
from gradtrail.core.nn.losses import log_odds
from gradtrail.core.train.changes import NO_CHANGES, changed_labels
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import Compiler
from gradtrail.experiments.compare.main import Changes, Engine, run_missing
from gradtrail.experiments.compare.plan import read_store
from gradtrail.experiments.repro import reproduce
from gradtrail.stages.common import plotting
from gradtrail.stages.common.dvc_cache import is_here, restore
from gradtrail.stages.common.files import atomic_file, digest, read_json
from gradtrail.stages.common.params import changed, load_section, params_file, validate
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import read_info, read_splits
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.stages.model.calibration import read_evaluated
from gradtrail.stages.model.members import weights_paths
from gradtrail.stages.model.weights import read_members, read_weights
from gradtrail.stages.report.gallery import encode_png
from gradtrail.stages.what_if import VALIDATION_LOSS, describe
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.tables import markdown_table
from gradtrail.tracking.runs import StoredRuns, find_equivalent_run
from gradtrail.tracking.state import WorkingState
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import outputs

SUBSET, SUPPORTERS, DROP, SUSPECT = KINDS = ("subset", "supporters", "drop", "suspect")
_PIPELINE, _REPORT = "pipeline/what_if/dvc.yaml", Path("results/comparisons/what_if")
_DATA, _RESULTS = Path("data/processed"), Path("results/what_if")
_SUSPECTS, _EVALUATION = Path("results/gradients/suspects.csv"), Path("results/evaluate")
_WEIGHTS = ("models/final.safetensors", "models/members")  # outs of the training that have the final weights
_MAX_SUPPORTERS = 0.001  # largest share of the training examples that is removed to flip a prediction
_NUM_SUSPECTS = 10
_FEWEST_SUBSETS = 3  # fewest retrained random subsets for an LDS
_STRONGEST = 6  # supporters and opponents of a test example on the page


class Intervention(NamedTuple):
    """A change of the training examples, whose effect is predicted and measured."""

    name: str
    kind: str  # one of `KINDS`
    changes: dict[str, Any]  # fields of `ChangesConfig`


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The results of the stage, and the data that they are about."""

    # `label`, `predicted` and `value` of each output, by its name: margins of test examples, then the validation loss
    outputs: pd.DataFrame
    influence: pd.DataFrame  # `proposed_label` and predicted changes of the outputs, by `example_id`
    splits: Mapping[str, Split]
    classes: tuple[str, ...]

    @property
    def tests(self) -> list[str]:
        """The names of the outputs that are margins: the example_id of each test example."""
        return [*self.outputs.index[:-1]]

    def effects(self, changes: Mapping[str, Any]) -> tuple[int, Float[np.ndarray, " outputs"]]:
        """Return the number of removed or relabeled examples, and the predicted change of each output in nats.

        The new label of an example is its proposed label.
        """
        names = changed_examples(self.splits[TRAIN], len(self.classes), **changes)
        columns = [f"{'relabel' if 'relabel' in changes else 'remove'}/{name}" for name in self.outputs.index]
        return len(names), self.influence.loc[names, columns].to_numpy(np.float64).sum(axis=0)

    def supporters(self, test: str) -> tuple[int, ...]:
        """Return the example_id of the strongest supporters whose predicted removal flips the sign of a margin.

        They are as few as possible; none if more than 0.1 % of the training examples would be needed.
        """
        margin = self.outputs["value"][test]
        effects = -np.sign(margin) * self.influence[f"remove/{test}"].to_numpy(np.float64)
        strongest = largest(effects, math.ceil(_MAX_SUPPORTERS * len(effects)))
        flips = np.cumsum(effects[strongest]) > abs(margin)
        count = int(np.argmax(flips)) + 1 if flips.any() else 0
        return tuple(self.influence.index[strongest[:count]].tolist())


def changed_examples(train: Split, num_classes: int, **changes: Any) -> Int[np.ndarray, " changed"]:
    """Return the example_id of each training example that these fields of `ChangesConfig` change, at least one."""
    labels = changed_labels(dataclasses.replace(NO_CHANGES, **changes), train.labels, train.example_id, num_classes)
    return train.example_id[labels != train.labels]


def what_if(
    engine: Engine, *, test: Sequence[int], drop: Path | None, suspects: bool, subsets: int, fraction: float
) -> int:
    """Predict what interventions change, retrain with each, and print and write predicted and real outputs.

    The arguments are the options of the command. Returns the exit status: 0, 1 if a retraining failed, or that of
    `dvc repro` if it failed.

    Raises:
        UserError, ConfigError: An id or a file is invalid, or effects of changes of this training cannot be predicted;
            one line.
    """
    config = load_section(TRAIN, TrainConfig)
    require_differentiable(config)
    dropped = read_drop(drop) if drop else ()
    if test:
        set_test_examples(test)
    if status := reproduce([_PIPELINE, *["gradients"] * suspects]):
        return status

    prediction = read_prediction()
    if round(fraction * len(prediction.influence)) < 1:
        raise UserError(f"--fraction must remove one of {len(prediction.influence):,} examples, got {fraction}")
    subset = {"omit_fraction": fraction}
    interventions = [Intervention(f"seed {seed}", SUBSET, subset | {"omit_seed": seed}) for seed in range(subsets)]
    explained = prediction.tests if test or not (drop or suspects) else []
    supporters = {name: prediction.supporters(name) for name in explained}
    interventions += [Intervention(name, SUPPORTERS, {"omit": ids}) for name, ids in supporters.items() if ids]
    if drop:
        interventions.append(Intervention(f"drop {drop.name}", DROP, {"omit": dropped}))
    for name in read_suspects() if suspects else ():
        label = int(prediction.influence["proposed_label"][name])
        title = f"{name} as {prediction.classes[label]}"
        interventions.append(Intervention(title, SUSPECT, {"relabel": ((name, label),)}))

    weights = retrain(interventions, engine)
    trained = [intervention for intervention in interventions if intervention.name in weights]
    if sum(intervention.kind == SUBSET for intervention in trained) < _FEWEST_SUBSETS:
        return 1
    results = result_table(prediction, trained, *read_outputs(prediction, weights))
    supporters = {test: ids for test, ids in supporters.items() if not ids or test in weights}
    report(results, fraction, describe_removals(prediction, supporters, results), supporters, prediction)
    return int(len(trained) < len(interventions))


# Inputs


def read_drop(path: Path) -> tuple[int, ...]:
    """Read the distinct values of the column `example_id` of a CSV file, ascending."""
    try:
        column = pd.read_csv(path, usecols=["example_id"], dtype=np.int64)["example_id"]
        if column.empty:
            raise ValueError("it has no row")
        names = tuple(sorted({*column.tolist()}))
        changed_examples(read_splits(_DATA)[TRAIN], read_info(_DATA).num_classes, omit=names)
    except (OSError, ValueError) as error:
        rule = "must be a CSV file with a column example_id of training examples"
        raise UserError(f"--drop: {path}: {rule}: {one_line(error)[:300]}") from None
    return names


def set_test_examples(names: Sequence[int]) -> None:
    """Set `what_if.test_examples` in its params file, as `dvc exp run -S` does."""
    names, file = [*dict.fromkeys(names)], params_file("what_if")
    params = read_yaml(file)
    validate(changed(params, {"what_if.test_examples": names})["what_if"], WhatIfConfig, "--test")
    positions_of(names, read_splits(_DATA)["test"], "--test")
    if params["what_if"]["test_examples"] != names:
        from dvc.utils.hydra import apply_overrides  # late: it takes a quarter of a second

        apply_overrides(file, [f"what_if.test_examples={names}"])
        print(f"what_if.test_examples in {file} is now {names}.", file=sys.stderr)


def read_prediction() -> Prediction:
    """Read the results of the stage; raise UserError if the training is not metasmooth."""
    path = _RESULTS / "influence.parquet"
    if not path.is_file():
        raise UserError(describe(read_json(Path("results/metrics/what_if.json"))["metasmoothness"]))
    values = pd.read_csv(_RESULTS / "outputs.csv", dtype={"output": str}).set_index("output")
    effects = [f"{kind}/{name}" for kind in ("remove", "relabel") for name in values.index]
    return Prediction(
        outputs=values,
        influence=read_parquet(path, ["example_id", "proposed_label", *effects]).set_index("example_id"),
        splits=read_splits(_DATA),
        classes=read_info(_DATA).classes,
    )


def read_suspects() -> list[int]:
    """Return the example_id of the most suspect training labels by the gradient analysis."""
    ranked = pd.read_csv(_SUSPECTS)
    return [int(name) for name in ranked.loc[ranked["split"] == TRAIN, "example_id"].head(_NUM_SUSPECTS)]


# Retrainings


def retrain(interventions: Sequence[Intervention], engine: Engine) -> dict[str, list[str]]:
    """Train with each intervention whose final weights are not here; return their digests by name.

    They are in the order of `_WEIGHTS`; those of trainings that failed are missing.
    """
    planned = {one.name: {f"train.changes.{key}": value for key, value in one.changes.items()} for one in interventions}

    def plan() -> tuple[Changes, Changes, dict[str, Run]]:
        planner = read_store()
        runs = {name: planner.training(changes, are_weights_here) for name, changes in planned.items()}
        missing = {name: planned[name] for name, run in runs.items() if run is None}
        return planned, missing, {name: run for name, run in runs.items() if run}

    runs, _ = run_missing("what-if", plan, engine, TRAIN)
    return {name: weights_of(run) for name, run in runs.items()}


def weights_of(run: Run) -> list[str]:
    """Return the digests of the final weights of a training."""
    return [outputs(run.data.tags)[out] for out in _WEIGHTS]


def are_weights_here(run: Run) -> bool:
    """Whether DVC's cache has the final weights of a training, which may have been trained elsewhere."""
    return all(map(is_here, _WEIGHTS, weights_of(run)))


def read_outputs(
    prediction: Prediction, weights: Mapping[str, Sequence[str]]
) -> tuple[Float[np.ndarray, " outputs"], dict[str, Float[np.ndarray, " outputs"]]]:
    """Return the outputs of the final weights in `models`, and of others by digest: means over members, in nats."""
    info, (model, _, _) = read_info(_DATA), read_weights(Path(_WEIGHTS[0]))
    test, validation = prediction.splits["test"], prediction.splits["validation"]
    test = test[positions_of([*map(int, prediction.tests)], test, "what_if.test_examples")]
    predict = inference.compile_predict_within(model, compiler=Compiler(time.perf_counter))

    def outputs_of(models: Path) -> Float[np.ndarray, " outputs"]:
        members = []
        for _, _, params, _ in read_members(weights_paths(models, "final"), info):
            logits = predict(params, test.images, test.labels)["logits"]
            margins = log_odds(jnp.asarray(logits), jnp.asarray(test.labels))
            members.append(np.append(margins, inference.validate(predict, params, validation)["loss"]))
        return np.asarray(members, np.float64).mean(axis=0)

    after = {}
    for name, digests in weights.items():
        with tempfile.TemporaryDirectory() as folder:
            for out, md5 in zip(_WEIGHTS, digests, strict=True):
                restore(out, md5, Path(folder), "")
            after[name] = outputs_of(Path(folder) / "models")
    return outputs_of(Path("models")), after


# Report


def result_table(
    prediction: Prediction,
    interventions: Sequence[Intervention],
    before: Float[np.ndarray, " outputs"],
    after: Mapping[str, Float[np.ndarray, " outputs"]],
) -> pd.DataFrame:
    """Return a row per intervention and output: the output before it, as predicted, and retrained."""
    parts = []
    for intervention in interventions:
        num_examples, effects = prediction.effects(intervention.changes)
        columns = {
            "intervention": intervention.name,
            "kind": intervention.kind,
            "examples": num_examples,
            "output": prediction.outputs.index,
            "before": before,
            "predicted": before + effects,
            "retrained": after[intervention.name],
        }
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def describe_removals(
    prediction: Prediction, supporters: Mapping[str, Sequence[int]], results: pd.DataFrame
) -> dict[str, str]:
    """Return what the removal of its supporters changes for each test example, predicted and retrained."""
    total, sentences = f"{len(prediction.influence):,}", {}
    of_removal = results[results["intervention"] == results["output"]].set_index("output")
    for test, names in supporters.items():
        label, answer = (prediction.classes[int(prediction.outputs[key][test])] for key in ("label", "predicted"))
        if names:
            before, predicted, retrained = map(float, of_removal.loc[test, ["before", "predicted", "retrained"]])
            half = f"gives {label} {'more' if before < 0 else 'less'} than one half"
            flip = f"answers {label}" if answer != label else half
            outcome = (
                f"without {len(names)} of {total} examples the network {flip} (margin {before:+.2f}, predicted "
                f"{predicted:+.2f}); retrained, "
                f"{'it did' if retrained * before < 0 else 'its margin keeps its sign'} ({retrained:+.2f})."
            )
        else:
            limit = math.ceil(_MAX_SUPPORTERS * len(prediction.influence))
            outcome = f"no removal of at most {limit} of {total} examples is predicted to change the answer."
        sentences[test] = f"Test example {test} (label {label}, answered {answer}): {outcome}"
    return sentences


def panel(prediction: Prediction, test: str) -> list[tuple[str, bytes, str]]:
    """Return a test example, and the training examples most for and against its label: title, image and caption."""
    train, tests, classes = prediction.splits[TRAIN], prediction.splits["test"], prediction.classes
    effects = prediction.influence[f"remove/{test}"].reindex(train.example_id).to_numpy(np.float64)
    place = positions_of([int(test)], tests, "--test")[0]
    examples = [(f"test {test}", encode_png(tests.images[place]), f"label {classes[tests.labels[place]]}")]
    for side, sign in (("for", -1), ("against", 1)):
        for place in largest(sign * effects, _STRONGEST):
            caption = f"label {classes[train.labels[place]]}, {effects[place]:+.2f}"
            examples.append((f"{side}: {train.example_id[place]}", encode_png(train.images[place]), caption))
    return examples


def report(
    results: pd.DataFrame,
    fraction: float,
    removals: Mapping[str, str],
    supporters: Mapping[str, Sequence[int]],
    prediction: Prediction,
) -> None:
    """Print the table of results and sentences on removals, write them, and log them to the run of the stage."""
    subsets, names = results[results["kind"] == SUBSET], [*prediction.outputs.index]
    changes = subsets[["predicted", "retrained"]].sub(subsets["before"], axis=0).to_numpy()
    predicted, real = changes.T.reshape(2, -1, len(names))
    by_output, lds = measure_lds(predicted, real)
    shares = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, by_output, strict=True))
    quality = (
        f"LDS {lds.value:.2f} (95 % interval {lds.low:.2f} to {lds.high:.2f}): mean rank correlation of predicted and "
        f"real changes of {len(names)} outputs over {len(subsets) // len(names)} random subsets of "
        f"{100 * fraction:g} % of the examples. By output: {shares}."
    )
    is_shown = (results["kind"] == DROP) | ((results["kind"] == SUSPECT) & (results["output"] == VALIDATION_LOSS))
    excerpt = results[is_shown].drop(columns="kind")
    rows: Any = excerpt.map(lambda cell: f"{cell:.6f}" if isinstance(cell, float) else str(cell)).to_dict("records")
    ids = {
        test: f"Their example_id, strongest first: {', '.join(map(str, names))}." for test, names in supporters.items()
    }
    sentences = [f"{sentence} {ids[test]}" if supporters[test] else sentence for test, sentence in removals.items()]
    print("\n\n".join([quality, *sentences, *([markdown_table(rows)] if rows else [])]))

    with atomic_file(_REPORT.with_suffix(".csv")) as temporary:
        results.to_csv(temporary, index=False, float_format="%.6g")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    page = environment.get_template("what_if.html.j2").render(
        quality=quality,
        removals=removals,
        supporters=supporters,
        panels={test: panel(prediction, test) for test in removals},
        rows=rows,
        figure=draw(results, lds),
    )
    with atomic_file(_REPORT.with_suffix(".html")) as temporary:
        temporary.write_text(page, encoding="utf-8")
    with contextlib.suppress(UserError):  # no evaluation of these weights, and so no report
        read_evaluated(_EVALUATION, Path("models"))
        style = report_style(digest(_EVALUATION / "calibration.json"), [*removals.values()])
        with atomic_file(_REPORT.with_suffix(".css")) as temporary:
            temporary.write_text(style, encoding="utf-8")
    print(f"written to {_REPORT}.html and .csv", file=sys.stderr)

    client = open_store()
    if run := find_equivalent_run(StoredRuns(client), WorkingState("what_if")):
        for suffix in (".html", ".csv"):
            client.log_artifact(run.info.run_id, str(_REPORT.with_suffix(suffix)), "results/comparisons")
        client.log_metric(run.info.run_id, "what_if/lds", lds.value)


def report_style(evaluation: str, sentences: Sequence[str]) -> str:
    """Return a style sheet by which a report with this digest of its evaluation shows the sentences and a link."""
    root = f':root[data-evaluation="{evaluation}"] #what-if'
    text = r"\A ".join(re.sub(r'["\\\n]', lambda match: f"\\{ord(match[0]):x} ", one) for one in sentences)
    return f'{root} {{ display: block }}\n{root}::after {{ content: "{text}" }}\n'


def draw(results: pd.DataFrame, lds: Interval) -> bytes:
    """Draw the real changes of the margins, and of the validation loss, against the predicted ones, as a PNG."""
    title = f"Predicted and retrained · LDS {lds.value:.2f} ({lds.low:.2f} to {lds.high:.2f})"
    figure, axes = plotting.new_figure(title, columns=2, size=(11, 4.8))
    changes = results[["predicted", "retrained"]].sub(results["before"], axis=0)
    is_loss = results["output"] == VALIDATION_LOSS
    for axis, heading, rows in zip(axes[0], ("margins", "validation loss"), (~is_loss, is_loss), strict=True):
        for kind, colour in zip(KINDS, plotting.CYCLE, strict=True):
            points = changes[rows & (results["kind"] == kind)]
            if len(points):
                axis.plot(points["predicted"], points["retrained"], "o", color=colour, alpha=0.6, label=kind)
        axis.axline((0, 0), slope=1, color=plotting.GREY, linewidth=1)
        axis.set(title=f"change of {heading}, nats", xlabel="predicted", ylabel="retrained")
        axis.locator_params(nbins=5)
        axis.legend(loc="upper left")
    with tempfile.TemporaryDirectory() as folder:
        plotting.save(figure, Path(folder) / "figure.png")
        return (Path(folder) / "figure.png").read_bytes()
