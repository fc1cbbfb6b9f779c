"""`deploy/slo.yaml`, whose comments describe the limits of a verdict and the thresholds of a canary."""

from dataclasses import dataclass
from pathlib import Path

from gradtrail.core.config import Count, Fraction, Positive, PositiveShare, config
from gradtrail.stages.common.params import load_section


@config
class Limits:
    """The limits of a verdict; None if one is not judged."""

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


@config
class CanaryThresholds:
    """When a challenger is stopped."""

    min_requests: Count
    max_error_rate: Fraction
    min_agreement: Fraction
    significance: PositiveShare


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The sections of `deploy/slo.yaml`."""

    limits: Limits
    canary: CanaryThresholds


def read_slo(path: Path = Path("deploy/slo.yaml")) -> Slo:
    """Read and validate `deploy/slo.yaml`; a UserError names the key, its value and the allowed values."""
    limits, canary = load_section("limits", Limits, path), load_section("canary", CanaryThresholds, path)
    return Slo(limits=limits, canary=canary)
