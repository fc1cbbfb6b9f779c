"""Tables and metrics of a privacy audit."""

from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.stages.privacy_audit.auditing import Audit


def write_tables(folder: Path, audit: Audit, trainings: int) -> None:
    """Write `canaries.parquet`, `bounds.csv` and `checks.csv` to a new folder."""
    folder.mkdir(parents=True)
    count = len(audit.scores) // trainings
    canaries = pd.DataFrame(
        {
            "training": np.repeat(np.arange(trainings, dtype=np.int32), count),
            "canary": np.tile(np.arange(count, dtype=np.int32), trainings),
            "included": audit.coins,
            "score": audit.scores.astype(np.float32),
        }
    )
    canaries.to_parquet(folder / "canaries.parquet", index=False)
    bounds = [
        {"guesses": one.guesses, "correct": one.correct, "epsilon_lower_bound": bound} for one, bound in audit.by_share
    ]
    pd.DataFrame(bounds).to_csv(folder / "bounds.csv", index=False, float_format="%.6g")
    checks = [{**vars(check), "passes": check.passes} for check in audit.checks]
    pd.DataFrame(checks).to_csv(folder / "checks.csv", index=False, float_format="%.6g")


def measure(audit: Audit) -> dict[str, float | str]:
    """Return the metrics of an audit, flat."""
    return {
        "epsilon": audit.claim.epsilon,
        "delta": audit.claim.delta,
        "epsilon_lower_bound": audit.lower_bound,
        "epsilon_lower_bound_any_mechanism": audit.lower_bound_any,
        "confidence": audit.confidence,
        "canaries": audit.guesses.canaries,
        "guesses": audit.guesses.guesses,
        "correct_guesses": audit.guesses.correct,
        "accuracy": audit.accuracy,
        **{f"checks/{check.name}": check.value for check in audit.checks},
        "failed_checks": sum(not check.passes for check in audit.checks),
        "faults": ", ".join(audit.faults) or "none",
    }
