"""Compile the configured training in several forms, and time them: params → static costs, pictures; times to MLflow."""

import contextlib
import functools
import tempfile
from pathlib import Path

from gradtrail.core.profile import variants as profiling
from gradtrail.core.profile.variants import ProfileConfig, Variant
from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common import dataset
from gradtrail.stages.common.setup import cache_disabled, set_up_jax
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.profile import figures, tables, timings
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(ProfileConfig), stage.params(TrainConfig, "train")
    info = dataset.read_info(Path("data/processed"))
    set_up_jax(stage.runtime)
    model = train_config.model_config(info.image_shape, info.num_classes)
    title, configured = f"{model.name} on {info.label}", Variant.of(train_config)

    compile_variant = functools.partial(
        profiling.compile_variant,
        train_config,
        image_shape=info.image_shape,
        num_classes=info.num_classes,
        num_examples=info.examples["train"],
    )
    variants = profiling.variants_to_compare(config, train_config)

    with tracked(stage) as run, compiling(run) as compiler:
        timed = timings.wanted(stage.runtime, is_tracked=run.is_open)
        pieces = len(variants) + timed * timings.PIECES
        with progress_bar("profile", pieces, unit="steps") as bar:
            with cache_disabled() if timed else contextlib.nullcontext():  # so that compiling takes what it takes
                first = compile_variant(configured, compiler=compiler)
            bar.advance(message=f"compiled {configured.label}")
            compiled = [first]
            for variant in variants[1:]:
                compiled.append(compile_variant(variant, compiler=compiler))
                bar.advance(message=f"compiled {variant.label}")
            if timed:
                taken = timings.take(
                    config,
                    compiled,
                    info.num_classes,
                    clock=compiler.clock,
                    advance=lambda message: bar.advance(message=message),
                )
                run.metrics(timings.metrics(taken, configured))
                with tempfile.TemporaryDirectory() as name:
                    timings.write(Path(name), taken, configured, title)
                    run.files(Path(name), "timings")
                bar.advance(message="drew the times")

        with stage.writing_outs() as new:
            costs = tables.cost_table(compiled)
            folder = new / "results" / "profile"
            tables.write_tables(folder, costs, tables.doubling_table(costs, configured))
            figures.draw_costs(folder / "costs.png", costs, configured, title)
            figures.draw_fusions(folder / "fusions.png", costs, configured, title)
            stage.write_metrics(new, {**info.as_metrics(), **tables.measure(costs, configured)})

        run.outs()


if __name__ == "__main__":
    run_stage(main, "profile")
