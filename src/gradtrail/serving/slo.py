"""`deploy/slo.yaml`: the limits of a verdict and the thresholds of a canary."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradtrail.core.config import Count, Fraction, Positive, PositiveShare, config
from gradtrail.stages.common.params import load_section


@config
class Limits:
    """The limits of a verdict, as `deploy/slo.yaml` describes them; None if a limit is not judged."""

    accuracy_lower_bound: Fraction | None
    calibration_error: Fraction | None
    worst_class_recall: Fraction | None
    size_mib: Positive | None
    memory_mib: Positive | None
    cold_start_seconds: Positive | None
    first_answer_ms: Positive | None
    p50_ms_1: Positive | None
    p99_ms_1: Positive | None
    p50_ms_32: Positive | None
    p99_ms_32: Positive | None
    images_per_second: Positive | None
    agreement: Fraction | None

    @property
    def digest(self) -> str:
        """SHA-256 of the limits, whatever the layout of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@config
class CanaryThresholds:
    """When a challenger is stopped."""

    min_requests: Count  # requests of the challenger before disagreement may stop it
    max_error_rate: Fraction  # share of the challenger's requests that may fail
    min_agreement: Fraction  # share of images that must get the champion's label
    significance: PositiveShare  # probability that one process, in one trial, stops a challenger within both thresholds


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The sections of `deploy/slo.yaml`."""

    limits: Limits
    canary: CanaryThresholds


def read_slo(path: Path = Path("deploy/slo.yaml")) -> Slo:
    """Read and validate `deploy/slo.yaml`; a UserError names the key, its value and the allowed values."""
    return Slo(
        limits=load_section("limits", Limits, path),
        canary=load_section("canary", CanaryThresholds, path),
    )
