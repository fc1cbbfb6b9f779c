"""Evaluate a model on the test split: `models`, `data/processed` → predictions, figures."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

import functools
from pathlib import Path

from gradtrail.core.evaluate import metrics
from gradtrail.core.evaluate.calibration import fit_temperature, logits_of
from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.core.nn import inference
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.artifacts import weights
from gradtrail.stages.artifacts.calibration import write_calibration
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.evaluate import figures, tables
from gradtrail.support.memory import require_memory
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(EvaluateConfig)
    info = dataset.read_info(Path("data/processed"))
    validation = dataset.read_split(Path("data/processed/validation.npz"), info)
    test = dataset.read_split(Path("data/processed/test.npz"), info)
    path = Path(f"models/{config.weights}.safetensors")
    model, params, about = weights.read_weights(path)
    weights.require_same_data(path, about, info)

    with tracked(stage) as run, compiling(run) as compiler:
        predict = inference.compile_predict(model, config.batch_size, compiler=compiler)
        weights_bytes = path.stat().st_size
        require_memory("evaluate.batch_size", config.batch_size, [predict], fixed_bytes=weights_bytes)
        call = functools.partial(inference.probabilities, functools.partial(predict, params), config.batch_size)
        temperature = fit_temperature(logits_of(call(validation)), validation.labels)
        result = metrics.evaluate(
            call(test), test.labels, temperature=temperature, calibration_bins=config.calibration_bins
        )

        with stage.writing_outs() as new:
            results = new / "results" / "evaluate"
            tables.write_tables(results, test, result, config.num_mistakes)
            write_calibration(results, path, result, num_examples=len(validation))
            title = f"{model.config.name}, {config.weights} weights (epoch {about.epoch}) on {info.label}, test"
            figures.draw(results, result, test, title, config.num_mistakes)
            corrected = metrics.corrected_metrics(result.predicted, test.labels, test.corrected_labels)
            measured = {**result.metrics(), **corrected}
            stage.write_metrics(new, {**info.as_metrics(), "epoch": about.epoch, **measured})
            stage.write_costs(new, static_costs([predict]))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "evaluate", shows=("num_examples", "num_mistakes", "loss", "accuracy"))
