"""Compile and time variants of the configured training: params → static costs, figures; times go to MLflow."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import tempfile
from pathlib import Path

from gradtrail.core.profile.benchmark import ProfileConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common import plotting
from gradtrail.stages.common.environment import set_cpu_devices
from gradtrail.stages.common.files import write_csv
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.profile import figures, timings
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked
from gradtrail.tracking.names import metric_name, precision_note


def main(stage: Stage) -> None:
    config, train_config = stage.params(ProfileConfig), stage.params(TrainConfig, "train")
    info = data_files.read_info(Path("data/processed"))
    title = f"{train_config.model_config(info.image_shape, info.num_classes).name} on {info.label}"
    set_cpu_devices(train_config.shards)

    with tracked(stage) as run, compiling(run) as compiler:
        compiled = timings.compile_variants(config, train_config, info, compiler=compiler)
        configured = compiled[0].variant
        timed = None
        if timings.is_timed(stage.runtime, is_tracked=run.is_open):
            timed = timings.take(config, compiled, info.num_classes, compiler=compiler)
        costs = timings.cost_rows(compiled)

        with stage.writing_outs() as new:
            folder = new / "results" / "profile"
            write_csv(folder / "costs.csv", costs)
            plotting.save(figures.draw_costs(costs, configured, title), folder / "costs.png")
            stage.write_metrics(new, {**info.as_metrics(), **timings.measure(costs, configured)})
            stage.write_costs(new, static_costs(compiled[0].functions.values()))

        if timed:
            run.metrics(timed.precisions)
            ratios = {metric_name("profile", name): value for name, value in timed.precisions.items()}
            if note := precision_note(ratios, configured.precision, configured.batch_size):
                print(f"profile: {note}", flush=True)
        run.outs()
        if timed:
            with tempfile.TemporaryDirectory() as name:
                timings.write(Path(name), timed, configured, title)
                run.files(Path(name), "timings")


if __name__ == "__main__":
    run_stage(main, "profile", shows=("train_step_flops", "train_step_total_bytes"))
