"""What an audit costs and what it finds: wall time and peak memory of `make audit`, and the planted labels found.

python -m benchmarks.audit
"""

import json
import sys
from pathlib import Path

from benchmarks.pipeline import measure_command
from benchmarks.record import record


def main() -> None:
    """Force the stage once and print what it found."""
    cost = measure_command(
        sys.executable, "-m", "gradtrail", "repro", "--force", "--single-item", "pipeline/audit/dvc.yaml"
    )
    print(f"audit: {cost.seconds:.0f} s, {cost.peak_mebibytes:.0f} MiB")
    metrics = json.loads(Path("results/metrics/audit.json").read_text())
    for noise in ("uniform", "confused"):
        auroc, precision, error = (
            metrics[f"{noise}/{name}"] for name in ("auroc", "average_precision", "calibration_error")
        )
        print(f"  {noise:8} {metrics['score']}: AUROC {auroc:.5f}, AP {precision:.4f}, calibration error {error:.4f}")
    record("audit", vars(cost) | metrics)


if __name__ == "__main__":
    main()
