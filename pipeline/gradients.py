"""Score every example by its gradient: `models`, `data/processed` → `scores.parquet`, pictures."""

import functools
import time
from pathlib import Path

from gradtrail.core import batches, per_example_gradients
from gradtrail.core.compilation import cost_metrics, time_metrics
from gradtrail.core.scores import GradientsConfig
from gradtrail.io import datasets, score_tables, weights
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.figures import gradients as figures
from gradtrail.io.progress import progress_bar
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config = stage.params(GradientsConfig)
    info = datasets.read_info(Path("data/processed"))
    splits = datasets.read_splits(Path("data/processed"), info)
    model, params, about = weights.read_weights(Path(f"models/{config.weights}.safetensors"))
    set_up_jax(stage.runtime)

    with tracked(stage) as row:
        score = per_example_gradients.compile_score(
            model, about.label_smoothing, config.microbatch_size, clock=time.perf_counter
        )
        row.metrics(time_metrics([score]))
        call = functools.partial(score, params)
        scores = {}
        with progress_bar("gradients", sum(map(len, splits.values())), unit="steps") as bar:
            for name, split in splits.items():
                parts = []
                for part in batches.map_batches(call, config.microbatch_size, split.images, split.labels):
                    parts.append(part)
                    bar.advance(len(part["loss"]))
                scores[name] = batches.join(parts)

        with stage.writing_outs() as new:
            results = new / "results" / "gradients"
            table = score_tables.score_table(splits, scores)
            score_tables.write_tables(results, table, config)
            title = f"{model.config.name}, {config.weights} weights (epoch {about.epoch}) on {info.label}"
            figures.draw(results, table, splits, title, config.num_largest)
            stage.write_metrics(
                new, {**info.as_metrics(), **score_tables.measure(table, config), **cost_metrics([score])}
            )

        row.outs()


if __name__ == "__main__":
    run_stage(main, "gradients")
