"""Look for wrong labels: `data/processed` → a score, a proposal and a probability for every label, figures."""

from gradtrail.tracking.tracker_process import start_tracker

start_tracker(__name__)

from pathlib import Path

from gradtrail.core.audit import ensemble, planting
from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.findings import find, find_planted
from gradtrail.core.nn.models import Model
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.artifacts.splits import read_splits, require_undeformed
from gradtrail.stages.audit import figures, tables
from gradtrail.stages.common import dataset
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.support.memory import require_memory
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.mlflow.compile_report import compiling
from gradtrail.tracking.mlflow.run import tracked


def main(stage: Stage) -> None:
    config = stage.params(AuditConfig).effective
    info = dataset.read_info(Path("data/processed"))
    require_undeformed(info, "audit")
    splits = read_splits(Path("data/processed"), info)
    model = Model(config.train_config().model_config(info.image_shape, info.num_classes))

    with tracked(stage) as run, compiling(run) as compiler:
        networks = ensemble.compile_networks(model, config, len(splits["train"]), compiler=compiler)
        fixed = networks.engine.argument_bytes
        require_memory("audit.batch_size", config.batch_size, networks.functions, fixed_bytes=fixed)
        with progress_bar("audit", planting.num_audit_visits(splits, config), unit="steps") as bar:
            out_of_fold, planted = planting.cross_validate_all(
                networks, splits, config, steps_per_call=stage.runtime.steps_per_call, advance=bar.advance
            )
        detection = tables.detection_table(planted)
        chosen = tables.choose_score(detection)
        findings = find(out_of_fold, {name: split.labels for name, split in splits.items()}, chosen, seed=config.seed)
        calibration = tables.calibration_of(planted, find_planted(planted, chosen, seed=config.seed))
        suspects = tables.suspect_table(splits, findings, chosen)

        with stage.writing_outs() as new:
            folder = new / "results" / "audit"
            title = f"{config.num_networks} × {model.config.name} on {info.label}"
            tables.write_tables(folder, suspects, detection, calibration)
            figures.draw(folder, suspects, splits, calibration, title, config.num_suspects)
            measured = tables.measure(findings, splits, detection, calibration, chosen)
            stage.write_metrics(new, {**info.as_metrics(), **measured})
            stage.write_costs(new, static_costs(networks.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "audit", shows=("train/expected_errors", "validation/expected_errors", "test/expected_errors"))
