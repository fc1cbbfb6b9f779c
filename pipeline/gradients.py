"""Score every example by its gradient: `models`, `data/processed` → scores, figures, and a summary in words."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import itertools
from pathlib import Path

from gradtrail.core.gradients.analysis import GradientsConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.changes import as_trained, read_trained
from gradtrail.stages.dp.guarantee import read_guarantee
from gradtrail.stages.gradients import figures, inputs, outputs, summary
from gradtrail.stages.gradients.every_example import NAME, score_every_example
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(GradientsConfig)
    info = data_files.read_info(Path("data/processed"))
    guarantee = read_guarantee(Path("results/train"))
    samples = read_trained(Path("data/processed"), Path("results/train"))
    splits = inputs.scored_splits(samples, guarantee)
    train = as_trained(data_files.read_split(Path("data/processed/train")), Path("results/train"))
    members = inputs.read_members(Path("models"), Path("results/train"), config.weights, info, splits["train"])
    first = next(members)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        passes = inputs.compile_all(first, compiler=compiler)
        rows = inputs.choose_examples(passes, config, splits, first.trajectory)
        members = itertools.chain([first], members)
        analyses = outputs.analyze_members(passes, members, splits, rows, config)
        num_train = len(splits["train"])
        results = outputs.collect(analyses, config, scratch, classes=info.classes, num_train=num_train)

        with stage.writing_outs() as new:
            folder = new / "results" / "gradients"
            results.write(folder)
            is_sample = 0 < num_train < len(train)
            every = score_every_example(passes, first.params, train, folder / NAME) if is_sample else {}
            weights = first.about.title(config.weights, len(results.seeds))
            title = f"{first.model.config.name}, {weights} on {info.label}"
            batch_size = first.trajectory.batch_size
            figures.draw(folder, results, inputs.take_train(splits, rows), title, batch_size)
            words = summary.summarize(title, results, config, batch_size, guarantee, every)
            (folder / "summary.md").write_text(words, encoding="utf-8")
            stage.write_metrics(new, info.as_metrics() | results.metrics | every, outputs.COMPARED)
            stage.write_costs(new, static_costs(passes.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "gradients", shows=("num_examples", "grad_norm_median", "noise_scale_typical"))
