"""Score every example by its gradient: `models`, `data/processed` → scores, figures, and a summary in words."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

import itertools
from pathlib import Path

import jax

from gradtrail.core.gradients.analysis import analyze, num_influenced, num_visits
from gradtrail.core.gradients.chunks import chunk_bytes
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.exact import compile_exact, float64_errors, sample_size
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.models import num_parameters
from gradtrail.core.sharding import make_mesh
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.artifacts.privacy import read_guarantee
from gradtrail.stages.artifacts.splits import open_large, read_samples
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.gradients import every_example, figures, inputs, members, summary, tables
from gradtrail.support.memory import require_memory_for_model
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(GradientsConfig)
    info = dataset.read_info(Path("data/processed"))
    guarantee = read_guarantee(Path("results/train"))
    splits = inputs.scored_splits(read_samples(Path("data/processed"), info), guarantee)
    large = open_large(Path("data/processed/train.npz"), info) if len(splits["train"]) else None
    rest = inputs.read_members(Path("models"), Path("results/train"), config.weights, info, splits["train"])
    first = next(rest)
    model, about, trajectory = first.model, first.about, first.trajectory
    summary.warn_of_unknown_layers(model)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        passes = compile_passes(
            model,
            about.label_smoothing,
            num_influenced(config, len(splits["test"])),
            curvature=config.curvature_iterations > 0,
            compiler=compiler,
            mesh=make_mesh(jax.local_devices()[:1]),
        )
        exact = compile_exact(model, about.label_smoothing, sample_size(splits), compiler=compiler)
        sums = chunk_bytes(num_parameters(trajectory.params[trajectory.scored]), info.num_classes)
        require_memory_for_model("gradients", [*passes.functions, exact], host_bytes=sums)
        analyzed = members.Members(scratch)
        for member in itertools.chain([first], rest):
            title = f"gradients {member.name}".strip()
            trajectory = member.trajectory
            with progress_bar(title, num_visits(trajectory, splits), unit="steps") as bar:
                analysis = analyze(passes, trajectory, splits, config, info.num_classes, advance=bar.advance)
            weights = trajectory.params[trajectory.scored]
            errors = float64_errors(exact, weights, splits, analysis.scores, label_smoothing=about.label_smoothing)
            scores = tables.score_table(splits, analysis.scores, member.dynamics)
            analyzed.add(member.seed, tables.make_tables(scores, analysis, config), analysis, errors)
        every: dict[str, float] = {}
        if large is not None:
            with progress_bar("gradients of every example", len(large), unit="steps") as bar:
                weights, path = first.trajectory.params[first.trajectory.scored], scratch / every_example.NAME
                every = every_example.score_every_example(passes, weights, large, path, advance=bar.advance)
        summary.warn_of_errors(analyzed.errors, model.config.precision)
        score_tables = analyzed.tables(config)

        with stage.writing_outs() as new:
            results = new / "results" / "gradients"
            title = f"{model.config.name}, {about.title(config.weights, len(analyzed.seeds))} on {info.label}"
            tables.write_tables(results, score_tables, analyzed.errors)
            if every:
                (scratch / every_example.NAME).rename(results / every_example.NAME)
            analyzed.write(results)
            figures.draw(results, score_tables, analyzed.first, splits, title, trajectory.batch_size)
            metrics = tables.measure(score_tables, analyzed.first) | analyzed.errors
            words = summary.summarize(
                title, score_tables, analyzed.first, metrics, config, trajectory.batch_size, analyzed.seeds
            )
            (results / "summary.md").write_text(
                summary.with_privacy_note(words, guarantee, every_example.summarize(every, len(splits["train"]))),
                encoding="utf-8",
            )
            stage.write_metrics(new, {**info.as_metrics(), **analyzed.metrics(), **every})
            stage.write_costs(new, static_costs(passes.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "gradients", shows=("num_examples", "grad_norm_median", "noise_scale_typical"))
