"""Score every example by its gradient: `models`, `data/processed` → scores, figures, and a summary in words."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

from gradtrail.core.gradients.analysis import num_visits
from gradtrail.core.gradients.chunks import chunk_bytes
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.exact import compile_exact, float64_errors, sample_size
from gradtrail.core.nn.models import num_parameters
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common.setup import cached_compiler
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.gradients import every_example, figures, members, summary, tables
from gradtrail.stages.gradients.loading import load_analysis
from gradtrail.support.memory import require_memory_for_model
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(GradientsConfig)
    loaded = load_analysis(stage, config)
    info, splits, large = loaded.info, loaded.splits, loaded.large
    model, about, trajectory = loaded.first.model, loaded.first.about, loaded.first.trajectory
    summary.warn_of_unknown_layers(model)

    with (
        tracked(stage) as run,
        compiling(run) as compiler,
        run.stage.scratch() as scratch,
        stage.processes.watched(stage.name),
    ):
        passes = loaded.compile(compiler)
        exact = compile_exact(model, about.label_smoothing, sample_size(splits), compiler=compiler)
        sums = chunk_bytes(num_parameters(trajectory.params[trajectory.scored]), info.num_classes)
        require_memory_for_model("gradients", [*passes.functions, exact], host_bytes=sums)
        analyzed = members.Members(scratch)
        for member in loaded.members:
            title = f"gradients {member.name}".strip()
            trajectory = member.trajectory
            with progress_bar(title, num_visits(trajectory, splits), unit="steps") as bar:
                analysis = loaded.analyze(passes, member, bar.advance)
            weights = trajectory.params[trajectory.scored]
            errors = float64_errors(exact, weights, splits, analysis.scores, label_smoothing=about.label_smoothing)
            scores = tables.score_table(splits, analysis.scores, member.dynamics)
            analyzed.add(member.seed, tables.make_tables(scores, analysis, config), analysis, errors)
        every: dict[str, float] = {}
        if large is not None:
            with progress_bar("gradients of every example", len(large), unit="steps") as bar:
                every = loaded.score_every_example(passes, large, scratch / every_example.NAME, bar.advance)
        stage.processes.leave()
        summary.warn_of_errors(analyzed.errors, model.config.precision)
        found = analyzed.tables(config)

        with stage.writing_outs() as new:
            results = new / "results" / "gradients"
            title = f"{model.config.name}, {about.title(config.weights, len(analyzed.seeds))} on {info.label}"
            tables.write_tables(results, found, analyzed.errors)
            if every:
                (scratch / every_example.NAME).rename(results / every_example.NAME)
            analyzed.write(results)
            figures.draw(results, found, analyzed.first, splits, title, trajectory.batch_size)
            metrics = tables.measure(found, analyzed.first) | analyzed.errors
            words = summary.in_words(
                title, found, analyzed.first, metrics, config, trajectory.batch_size, analyzed.seeds
            )
            (results / "summary.md").write_text(
                summary.marked(words, loaded.promise, every_example.in_words(every, len(splits["train"]))),
                encoding="utf-8",
            )
            stage.write_metrics(new, {**info.as_metrics(), **analyzed.metrics(), **every})
            stage.write_costs(new, static_costs(passes.functions))

        run.outs()


def follow(stage: Stage) -> None:
    """Do a share of the passes of process 0, which writes and logs."""
    load_analysis(stage, stage.params(GradientsConfig)).follow(cached_compiler(stage.runtime, waits=False))
    stage.processes.leave()


if __name__ == "__main__":
    run_stage(main, "gradients", shows=("num_examples", "grad_norm_median", "noise_scale_typical"), follow=follow)
