"""Evaluate a model on the test split: `models`, `data/processed` → predictions, pictures."""

import functools
from pathlib import Path

from gradtrail.core import batches, evaluation, prediction
from gradtrail.core.compilation import cost_metrics
from gradtrail.core.evaluation import EvaluateConfig
from gradtrail.core.models import num_parameters
from gradtrail.io import datasets, predictions, weights
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.compile_profiles import compiling
from gradtrail.io.figures import evaluate as figures
from gradtrail.io.memory import require_memory
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config = stage.params(EvaluateConfig)
    info = datasets.read_info(Path("data/processed"))
    test = datasets.read_split(Path("data/processed/test.npz"), info)
    path = Path(f"models/{config.weights}.safetensors")
    model, params, about = weights.read_weights(path)
    weights.require_same_data(path, about, info)
    set_up_jax(stage.runtime)

    with tracked(stage) as row, compiling(row) as compiler:
        predict = prediction.compile_predict(model, config.batch_size, compiler=compiler)
        fixed = num_parameters(params) * 4
        require_memory("evaluate.batch_size", config.batch_size, [predict], fixed_bytes=fixed)
        call = functools.partial(predict, params)
        rows = batches.join(list(batches.map_batches(call, config.batch_size, test.images, test.labels)))
        result = evaluation.evaluate(
            rows["probabilities"], rows["loss"], test.labels, calibration_bins=config.calibration_bins
        )

        with stage.writing_outs() as new:
            results = new / "results" / "evaluate"
            predictions.write_tables(results, test, result, config.num_mistakes)
            title = f"{model.config.name}, {config.weights} weights (epoch {about.epoch}) on {info.label}, test"
            figures.draw(results, result, test, title, config.num_mistakes)
            stage.write_metrics(
                new, {**info.as_metrics(), "epoch": about.epoch, **result.metrics(), **cost_metrics([predict])}
            )

        row.outs()


if __name__ == "__main__":
    run_stage(main, "evaluate")
