"""Export the evaluated model as programs that need no Flax and none of this code: `models` → `models/export`."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

from pathlib import Path

from gradtrail.core.export import ExportConfig
from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages import export
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.data import data_files
from gradtrail.stages.model.calibration import read_evaluated
from gradtrail.stages.model.exported import read_export
from gradtrail.support.memory import require_memory
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(ExportConfig)
    info = data_files.read_info(Path("data/processed"))
    test = data_files.read_split(Path("data/processed/test"))
    evaluated = read_evaluated(Path("results/evaluate"), Path("models"))
    predictions = export.read_evaluation(Path("results/evaluate"), test, info.num_classes)
    network = export.read_network(evaluated, info)

    with tracked(stage) as run, compiling(run) as compiler, run.stage.scratch() as scratch:
        folder = scratch / "export"
        export.write_export(folder, network, config)
        exported = read_export(folder)
        forward = export.compile_largest(exported, compiler=compiler)
        largest, fixed = config.batch_sizes[-1], sum(tensor.nbytes for tensor in exported.tensors.values())
        require_memory("export.batch_sizes", largest, [forward], fixed_bytes=fixed)
        answers = export.answers(exported, forward, test)

        with stage.writing_outs() as new:
            metrics = export.measure(folder, evaluated, predictions, answers)
            stage.write_metrics(new, {**info.as_metrics(), **metrics}, export.COMPARED)
            stage.write_costs(new, static_costs([forward]))
            folder.rename(new / "models" / "export")

        run.outs()


if __name__ == "__main__":
    run_stage(main, "export", shows=("size_bytes", "largest_difference"))
