"""Compile the configured functions in several forms, on shapes alone: params → static costs, a picture."""

from pathlib import Path

from gradtrail.core import profiling
from gradtrail.core.profiling import ProfileConfig
from gradtrail.core.train_config import TrainConfig
from gradtrail.io import cost_tables, datasets
from gradtrail.io.accelerator import set_up_jax
from gradtrail.io.compile_profiles import compiling
from gradtrail.io.figures import profile as figures
from gradtrail.io.progress import progress_bar
from gradtrail.io.stages import Stage, run_stage
from gradtrail.io.tracking import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(ProfileConfig), stage.params(TrainConfig, "train")
    info = datasets.read_info(Path("data/processed"))
    set_up_jax(stage.runtime)

    with tracked(stage) as row, compiling(row) as compiler:
        forms = profiling.variants_to_compile(config, train_config)
        variants = []
        with progress_bar("profile", len(forms), unit="steps") as bar:
            for precision, batch_size in forms:
                variants.append(
                    profiling.compile_variant(
                        train_config,
                        precision,
                        batch_size,
                        image_shape=info.image_shape,
                        num_classes=info.num_classes,
                        num_examples=info.examples["train"],
                        compiler=compiler,
                    )
                )
                bar.advance(message=f"{precision}, batch size {batch_size}")

        with stage.writing_outs() as new:
            table = cost_tables.cost_table(variants)
            cost_tables.write_table(new / "results" / "profile", table)
            model = train_config.model_config(info.image_shape, info.num_classes)
            figures.draw(new / "results" / "profile" / "costs.png", table, f"{model.name} on {info.label}")
            figures_of = cost_tables.measure(table, train_config.precision, train_config.batch_size)
            stage.write_metrics(new, {**info.as_metrics(), **figures_of})

        row.outs()


if __name__ == "__main__":
    run_stage(main, "profile")
