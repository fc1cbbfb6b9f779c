"""Score every example by its gradient: `models`, `data/processed` → scores, figures, and a summary in words."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import itertools
from pathlib import Path

from gradtrail.core.gradient_check import check_gradients
from gradtrail.core.gradients.analysis import GradientsConfig, analyze, num_visits
from gradtrail.core.gradients.exact import float64_errors
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.changes import as_trained, read_trained
from gradtrail.stages.dp.guarantee import read_guarantee
from gradtrail.stages.gradients import figures, inputs, outputs, summary
from gradtrail.stages.gradients.every_example import NAME, score_every_example
from gradtrail.support.progress import progress_bar
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
    check_gradients(first.model, [first.params])

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        passes, exact = inputs.compile_all(first, splits, compiler=compiler)
        rows = inputs.choose_examples(passes, config, splits, first.trajectory)
        analyzed = inputs.take_train(splits, rows)
        analyses = outputs.Analyses(scratch, len(splits["train"]), info.classes)
        for member in itertools.chain([first], members):
            visits = num_visits(member.trajectory, analyzed)
            with progress_bar(f"gradients seed {member.seed}", visits, unit="steps") as bar:
                analysis = analyze(passes, member.trajectory, analyzed, config, info.num_classes, advance=bar.advance)
            errors = float64_errors(exact, member.params, analyzed, analysis.scores)
            dynamics = {name: values[rows] for name, values in member.dynamics.items()}
            scores = outputs.score_table(analyzed, analysis.scores, dynamics)
            analyses.add(member.seed, outputs.make_tables(scores, analysis, config), analysis, errors)
        outputs.warn_of_errors(analyses.errors, first.model.config.precision)

        with stage.writing_outs() as new:
            results = new / "results" / "gradients"
            tables = analyses.write(results, config)
            is_sample = 0 < len(splits["train"]) < len(train)
            every = score_every_example(passes, first.params, train, results / NAME) if is_sample else {}
            weights = first.about.title(config.weights, len(analyses.seeds))
            title = f"{first.model.config.name}, {weights} on {info.label}"
            batch_size = first.trajectory.batch_size
            figures.draw(results, tables, analyses.first, analyzed, title, batch_size)
            words = summary.summarize(title, tables, analyses, config, batch_size, guarantee, every)
            (results / "summary.md").write_text(words, encoding="utf-8")
            stage.write_metrics(new, info.as_metrics() | analyses.metrics() | every, outputs.COMPARED)
            stage.write_costs(new, static_costs(passes.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "gradients", shows=("num_examples", "grad_norm_median", "noise_scale_typical"))
