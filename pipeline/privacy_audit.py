"""Audit a private training: `data/processed` and the section `train` → what canaries prove of its epsilon, a figure."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from pathlib import Path

from gradtrail.core.gradient_check import check_gradients
from gradtrail.core.nn.models import Model
from gradtrail.core.privacy_audit import AuditedTraining, PrivacyAuditConfig, draw_canaries
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.dp_sgd import rows_at_once
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import privacy_audit
from gradtrail.stages.common.environment import set_cpu_devices
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import read_split
from gradtrail.stages.dp import accounting
from gradtrail.support.memory import require_memory
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config, train_config = stage.params(PrivacyAuditConfig), stage.params(TrainConfig, "train")
    privacy_audit.require_private(train_config)
    info = data_files.read_info(Path("data/processed"))
    train = read_split(Path("data/processed/train"))
    canaries = draw_canaries(config, train, info.num_classes)
    noise = accounting.account(train_config, len(train)).noise_multiplier
    set_cpu_devices(train_config.shards)
    model = Model(train_config.model_config(info.image_shape, info.num_classes), remat=train_config.remat)
    check_gradients(model, batch_size=rows_at_once(train_config, model))

    with tracked(stage) as run, compiling(run) as compiler:
        training = AuditedTraining(train_config, model, len(train), config.num_canaries, noise, compiler=compiler)
        fixed = training.epoch.cost.argument_bytes
        require_memory("train.batch_size", train_config.batch_size, training.functions, fixed_bytes=fixed)
        steps = accounting.Steps(rate=training.rate, noise_multiplier=noise, number=training.num_steps)
        delta = train_config.privacy.delta
        with progress_bar("privacy_audit", config.trainings * training.num_steps, unit="steps") as bar:
            claim = {"epsilon": steps.epsilon(delta), "delta": delta}
            result = privacy_audit.audit(config, training, train, canaries, **claim, advance=bar.advance)

        with stage.writing_outs() as new:
            folder = new / "results" / "privacy_audit"
            privacy_audit.write_results(folder, result, config.trainings, f"{model.config.name} on {info.label}")
            stage.write_metrics(new, {**info.as_metrics(), **result.metrics()})
            stage.write_costs(new, static_costs(training.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "privacy_audit", shows=("epsilon", "epsilon_lower_bound"))
