"""Evaluate a model on the test split: `models`, `data/processed` → predictions, figures."""

import functools
from pathlib import Path

from gradtrail.core.common import batching
from gradtrail.core.evaluate import metrics
from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.core.nn import inference
from gradtrail.core.xla.compiler import cost_metrics
from gradtrail.stages.artifacts import weights
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.evaluate import figures, tables
from gradtrail.support.memory import require_memory
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(EvaluateConfig)
    info = dataset.read_info(Path("data/processed"))
    test = dataset.read_split(Path("data/processed/test.npz"), info)
    path = Path(f"models/{config.weights}.safetensors")
    model, params, about = weights.read_weights(path)
    weights.require_same_data(path, about, info)

    with tracked(stage) as run, compiling(run) as compiler:
        predict = inference.compile_predict(model, config.batch_size, compiler=compiler)
        weights_bytes = path.stat().st_size
        require_memory("evaluate.batch_size", config.batch_size, [predict], fixed_bytes=weights_bytes)
        call = functools.partial(predict, params)
        rows = batching.join(list(batching.map_batches(call, config.batch_size, test.images, test.labels)))
        result = metrics.evaluate(
            rows["probabilities"], rows["loss"], test.labels, calibration_bins=config.calibration_bins
        )

        with stage.writing_outs() as new:
            results = new / "results" / "evaluate"
            tables.write_tables(results, test, result, config.num_mistakes)
            title = f"{model.config.name}, {config.weights} weights (epoch {about.epoch}) on {info.label}, test"
            figures.draw(results, result, test, title, config.num_mistakes)
            corrected = metrics.corrected_metrics(result.predicted, test.labels, test.corrected_labels)
            measured = {**result.metrics(), **corrected, **cost_metrics([predict])}
            stage.write_metrics(new, {**info.as_metrics(), "epoch": about.epoch, **measured})

        run.outs()


if __name__ == "__main__":
    run_stage(main, "evaluate")
