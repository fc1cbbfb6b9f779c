"""Evaluate a model on the test split: `models`, `data/processed` → predictions, figures."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import itertools
from pathlib import Path

from gradtrail.core.evaluate import EvaluateConfig
from gradtrail.core.nn import inference
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import evaluate
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.model import weights
from gradtrail.stages.model.calibration import warn_of_few, write_calibration
from gradtrail.stages.model.members import weights_paths
from gradtrail.support.memory import require_memory
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked
from gradtrail.tracking.stale_outs import warn_of_earlier_model
from gradtrail.tracking.verdict import print_verdict_of_experiment


def main(stage: Stage) -> None:
    config = stage.params(EvaluateConfig)
    info = data_files.read_info(Path("data/processed"))
    validation = data_files.read_split(Path("data/processed/validation"))
    test = data_files.read_split(Path("data/processed/test"))
    paths = weights_paths(Path("models"), config.weights)
    members = weights.read_members(paths, info)
    first = next(members)
    _, model, _, about = first

    with tracked(stage) as run, compiling(run) as compiler:
        predict = inference.compile_predict_within(model, config.batch_size, compiler=compiler)
        functions, fixed = [predict.function], next(iter(paths.values())).stat().st_size
        require_memory("evaluate.batch_size", predict.batch_size, functions, fixed_bytes=fixed)
        splits = (validation, test)
        predictions = evaluate.predict(predict, itertools.chain([first], members), paths, splits)
        evaluation = evaluate.evaluate(predictions, splits, config)

        with stage.writing_outs() as new:
            results = new / "results" / "evaluate"
            evaluate.write_tables(results, test, evaluation, config.num_mistakes, info.classes)
            write_calibration(results, evaluation.by_weights, evaluation.ensemble, num_examples=len(validation))
            title = f"{model.config.name}, {about.title(config.weights, len(paths))} on {info.label}, test"
            evaluate.draw_figures(results, evaluation, test, title, config.num_mistakes, info.classes)
            stage.write_metrics(new, {**info.as_metrics(), **evaluation.metrics(test)}, evaluate.COMPARED)
            stage.write_costs(new, static_costs(functions))

        run.outs()

    warn_of_few(len(validation))
    warn_of_earlier_model(stage.folder)
    print_verdict_of_experiment(stage.folder)


if __name__ == "__main__":
    run_stage(main, "evaluate", shows=("num_examples", "num_mistakes", "loss", "accuracy", "balanced_accuracy"))
