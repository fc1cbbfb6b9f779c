"""What if a training example had not been there? `data/processed`, `models` → predicted changes of outputs."""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import sys

from gradtrail.core.xla.compiler import static_costs
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.what_if import WhatIf, describe
from gradtrail.tracking.compile_report import compiling
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    what_if = WhatIf.load(stage)

    with tracked(stage) as run, compiling(run) as compiler:
        what_if.compile(compiler)
        what_if.run()
        print(f"what_if: {describe(what_if.smoothness)}", file=sys.stderr)

        with stage.writing_outs() as new:
            what_if.write(new)
            metrics = {"metasmoothness": what_if.smoothness, "outputs": len(what_if.outputs)}
            stage.write_metrics(new, what_if.info.as_metrics() | metrics)
            stage.write_costs(new, static_costs(what_if.functions))

        run.outs()


if __name__ == "__main__":
    run_stage(main, "what_if", shows=("metasmoothness", "outputs"))
