"""Look for wrong labels: `data/processed` → a score, a proposal and a probability for every label, figures."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from pathlib import Path

from gradtrail.core.audit.labels import find_errors
from gradtrail.core.audit.networks import AuditConfig, CrossValidation
from gradtrail.core.nn.models import Model
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import audit
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import read_splits
from gradtrail.support.memory import require_memory, require_memory_for_model
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(AuditConfig)
    info = data_files.read_info(Path("data/processed"))
    splits = read_splits(Path("data/processed"))
    model = Model(config.train_config().model_config(info.image_shape, info.num_classes))

    with tracked(stage) as run, compiling(run) as compiler:
        networks = CrossValidation(model, config, len(splits["train"]), compiler=compiler)
        training, passes = networks.training, (networks.logits.function, networks.grad_norms.function)
        fixed = training.run_steps.cost.argument_bytes
        require_memory("audit.batch_size", config.batch_size, training.functions, fixed_bytes=fixed)
        require_memory_for_model("audit", passes, host_bytes=0)
        with progress_bar("audit", config.num_epochs, unit="steps") as bar:
            out_of_fold, planted = networks.run(splits, advance=bar.advance)

        correct = splits["train"].labels
        detection = audit.detection_table(planted, correct)
        chosen = audit.choose_score(detection)
        findings = find_errors(out_of_fold, chosen, seed=config.seed)
        calibration = audit.calibrate(planted, correct, chosen, seed=config.seed)
        suspects = audit.suspect_table(splits, findings, chosen)

        with stage.writing_outs() as new:
            folder = new / "results" / "audit"
            audit.write_tables(folder, suspects, detection, calibration)
            title = f"{config.num_networks} × {model.config.name} on {info.label}"
            audit.write_figures(folder, suspects, splits, calibration, title, config.num_suspects, info.classes)
            measured = audit.audit_metrics(findings, splits, detection, calibration, chosen)
            stage.write_metrics(new, {**info.as_metrics(), **measured})
            stage.write_costs(new, static_costs(networks.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "audit", shows=("train/expected_errors", "validation/expected_errors", "test/expected_errors"))
