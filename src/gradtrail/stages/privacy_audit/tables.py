"""Tables and metrics of a privacy audit."""

from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.stages.privacy_audit.auditing import Audit


def write_tables(folder: Path, found: Audit, trainings: int) -> None:
    """Write `canaries.parquet`, `bounds.csv` and `checks.csv` to a new folder."""
    folder.mkdir(parents=True)
    count = len(found.scores) // trainings
    canaries = pd.DataFrame(
        {
            "training": np.repeat(np.arange(trainings, dtype=np.int32), count),
            "canary": np.tile(np.arange(count, dtype=np.int32), trainings),
            "included": found.coins,
            "score": found.scores.astype(np.float32),
        }
    )
    canaries.to_parquet(folder / "canaries.parquet", index=False)
    bounds = [
        {"guesses": one.guesses, "correct": one.correct, "epsilon_lower_bound": bound} for one, bound in found.by_share
    ]
    pd.DataFrame(bounds).to_csv(folder / "bounds.csv", index=False, float_format="%.6g")
    checks = [{**vars(check), "passes": check.passes} for check in found.checks]
    pd.DataFrame(checks).to_csv(folder / "checks.csv", index=False, float_format="%.6g")


def measure(found: Audit) -> dict[str, float | str]:
    """Return the metrics of an audit, flat."""
    return {
        "epsilon": found.claim.epsilon,
        "delta": found.claim.delta,
        "epsilon_lower_bound": found.lower_bound,
        "epsilon_lower_bound_any_mechanism": found.lower_bound_any,
        "confidence": found.confidence,
        "canaries": found.guesses.canaries,
        "guesses": found.guesses.guesses,
        "correct_guesses": found.guesses.correct,
        "accuracy": found.accuracy,
        **{f"checks/{check.name}": check.value for check in found.checks},
        "failed_checks": sum(not check.passes for check in found.checks),
        "faults": ", ".join(found.faults) or "none",
    }
