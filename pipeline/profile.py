"""Compile the configured training in several forms, and time them: params → static costs, pictures; times to MLflow."""

import contextlib
import functools
from pathlib import Path

from gradtrail.core import profiling
from gradtrail.core.profiling import ProfileConfig, Variant
from gradtrail.core.train_config import TrainConfig
from gradtrail.io import cost_tables, datasets, timings
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.compile_cache import nothing_kept
from gradtrail.io.compile_profiles import compiling
from gradtrail.io.figures import profile as figures
from gradtrail.io.progress import progress_bar
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(ProfileConfig), stage.params(TrainConfig, "train")
    info = datasets.read_info(Path("data/processed"))
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

    with tracked(stage) as row, compiling(row) as compiler:
        timed = timings.wanted(row)
        pieces = len(variants) + timed * timings.PIECES
        with progress_bar("profile", pieces, unit="steps") as bar:
            with nothing_kept() if timed else contextlib.nullcontext():  # so that compiling takes what it takes
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
                timings.log(row, taken, configured, title)
                bar.advance(message="drew the times")

        with stage.writing_outs() as new:
            costs = cost_tables.cost_table(compiled)
            folder = new / "results" / "profile"
            cost_tables.write_tables(folder, costs, cost_tables.doubling_table(costs, configured))
            figures.draw_costs(folder / "costs.png", costs, configured, title)
            figures.draw_fusions(folder / "fusions.png", costs, configured, title)
            stage.write_metrics(new, {**info.as_metrics(), **cost_tables.measure(costs, configured)})

        row.outs()


if __name__ == "__main__":
    run_stage(main, "profile")
