"""`deploy/slo.yaml`: the limits of a verdict, the thresholds of a canary, and the objectives of the service."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradtrail.core.common.validation import (
    AT_LEAST_ONE,
    POSITIVE,
    POSITIVE_SHARE,
    Bounds,
    check_fields,
)
from gradtrail.stages.common.params import load_section

_SHARE: Bounds = {"at_least": 0, "at_most": 1}
_RATIO: Bounds = {"at_least": 1, "at_most": 1000}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model must keep; None where a limit is not judged.

    Attributes:
        accuracy_lower_bound: at least; on the test split.
        calibration_error: at most; expected, on the test split.
        worst_class_recall: at least; the lowest over the classes, on the test split.
        size_mib: at most; of all files of the export.
        memory_mib: at most; peak resident memory of a process that answered with every batch size.
        cold_start_seconds: at most; process start to first answer, with an empty compilation cache.
        first_answer_ms: at most; the first answer of a process that has compiled every batch size.
        p50_ms_1: at most; median latency of one image, steady state.
        p99_ms_1: at most; 99th percentile of the same.
        p50_ms_32: at most; median latency of 32 images.
        p99_ms_32: at most; 99th percentile of the same.
        images_per_second: at least; at the largest batch size.
        agreement: at least; share of the test split that the champion labels alike.
    """

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
        """SHA-256 of the limits, which does not depend on how the file is written."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CanaryThresholds:
    """When a challenger is stopped.

    Attributes:
        min_requests: answers before a comparison stops it.
        max_error_rate: share of its requests.
        max_latency_ratio: of its median latency to the champion's.
        min_agreement: share of images that both label alike.
        max_class_share_distance: total variation distance of the shares of predicted classes.
        significance: chance, in all, that one process, in one trial, stops a challenger that just keeps the thresholds.
    """

    min_requests: int
    max_error_rate: float
    max_latency_ratio: float
    min_agreement: float
    max_class_share_distance: float
    significance: float

    def __post_init__(self) -> None:
        check_fields(
            self,
            min_requests=AT_LEAST_ONE,
            max_error_rate=_SHARE,
            max_latency_ratio=_RATIO,
            min_agreement=_SHARE,
            max_class_share_distance=_SHARE,
            significance=POSITIVE_SHARE,
        )


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What the service promises, over a window.

    Attributes:
        availability: share of requests without an error of the server.
        latency_ms: within which `latency_share` of requests are answered.
        latency_share: see there.
        window_days: over which the shares are counted.
    """

    availability: float
    latency_ms: float
    latency_share: float
    window_days: int

    def __post_init__(self) -> None:
        window: Bounds = {"at_least": 1, "at_most": 366}
        shares = {"availability": POSITIVE_SHARE, "latency_share": POSITIVE_SHARE}
        check_fields(self, **shares, latency_ms=POSITIVE, window_days=window)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The sections of `deploy/slo.yaml`."""

    limits: Limits
    canary: CanaryThresholds
    objectives: Objectives


def read_slo(path: Path = Path("deploy/slo.yaml")) -> Slo:
    """Read and validate `deploy/slo.yaml`; raise UserError with the key, its value and the allowed values."""
    return Slo(
        limits=load_section("limits", Limits, path),
        canary=load_section("canary", CanaryThresholds, path),
        objectives=load_section("objectives", Objectives, path),
    )
