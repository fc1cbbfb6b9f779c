"""Split the data set, with label noise and corrections if asked for: `data/raw` → `data/processed`, figures."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from collections.abc import Iterable
from pathlib import Path

from gradtrail.core.data import PreprocessConfig, Split, prepare
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.preprocess import corrections, figures
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(PreprocessConfig)
    if config.deformations > 1:
        stage.set_up_jax()
    info = data_files.read_info(Path("data/raw"))
    raw = data_files.read_raw(Path("data/raw"))
    sizes = {"train": len(raw[1]), "test": len(raw[3])}

    with tracked(stage) as run:
        splits = prepare(*raw, config, num_classes=info.num_classes)
        if config.corrections:
            splits = corrections.apply_corrections(splits, config.corrections, sizes, info.num_classes)
        train, num_versions = splits["train"], config.deformations
        figures.warn_of_small_classes(train.labels, info.classes, versions=num_versions)

        with (
            stage.writing_outs() as new,
            progress_bar("preprocess", num_versions * len(train), unit="steps") as bar,
        ):
            versions: Iterable[Split] = [train]
            if num_versions == 1:
                bar.advance(len(train))
            else:
                from gradtrail.core.augmentation import versions_of  # late: it imports JAX

                seed, num_ids = config.seed, sizes["train"]
                versions = versions_of(
                    train, num_versions, config.deformation, seed=seed, num_ids=num_ids, advance=bar.advance
                )
            processed = new / "data" / "processed"
            info = data_files.write_processed(processed, splits, info, train_versions=versions, versions=num_versions)
            metrics = data_files.measure_splits(data_files.read_splits(processed))
            figures.draw_samples(
                new / "results/preprocess/samples.png", train, info.label, info.num_classes, info.class_names
            )
            stage.write_metrics(new, {**info.as_metrics(), **metrics})

        run.outs()


if __name__ == "__main__":
    run_stage(main, "preprocess", shows=("train_examples", "validation_examples", "test_examples", "noisy_labels"))
