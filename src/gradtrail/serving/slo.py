"""`deploy/slo.yaml`: the limits of a verdict and the thresholds of a canary."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradtrail.core.common.validation import AT_LEAST_ONE, POSITIVE, POSITIVE_SHARE, Bounds, check_fields
from gradtrail.stages.common.params import load_section

_SHARE: Bounds = {"at_least": 0, "at_most": 1}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a verdict, as `deploy/slo.yaml` describes them; None if a limit is not judged."""

    accuracy_lower_bound: float | None
    calibration_error: float | None
    worst_class_recall: float | None
    size_mib: float | None
    memory_mib: float | None
    cold_start_seconds: float | None
    first_answer_ms: float | None
    p50_ms_1: float | None
    p99_ms_1: float | None
    p50_ms_32: float | None
    p99_ms_32: float | None
    images_per_second: float | None
    agreement: float | None

    def __post_init__(self) -> None:
        shares = dict.fromkeys(("accuracy_lower_bound", "calibration_error", "worst_class_recall", "agreement"), _SHARE)
        check_fields(self, **{name: shares.get(name, POSITIVE) for name in vars(self)})

    @property
    def digest(self) -> str:
        """SHA-256 of the limits, whatever the layout of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CanaryThresholds:
    """When a challenger is stopped."""

    min_requests: int  # requests of the challenger before disagreement may stop it
    max_error_rate: float  # share of the challenger's requests that may fail
    min_agreement: float  # share of images that must get the champion's label
    significance: float  # probability that one process, in one trial, stops a challenger within both thresholds

    def __post_init__(self) -> None:
        check_fields(
            self,
            min_requests=AT_LEAST_ONE,
            max_error_rate=_SHARE,
            min_agreement=_SHARE,
            significance=POSITIVE_SHARE,
        )


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
