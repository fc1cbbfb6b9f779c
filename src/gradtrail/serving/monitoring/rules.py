"""Alerting rules for Prometheus, made of `deploy/slo.yaml`.

    python -m gradtrail.serving.monitoring.rules

writes `deploy/prometheus/rules.yaml`; a test compares it with what `deploy/slo.yaml` says now.

The objectives are watched by their burn rate in several windows, as in B. Beyer et al. (eds.), "The Site Reliability
Workbook", O'Reilly 2018, chapter 5, "Alerting on SLOs", approach 6: an alert fires while a long window has burnt its
part of the error budget and a short one, a twelfth of it, still burns as fast. The burn rate is that part times the
objective's window over the long one: 14.4 for 2 % of 30 days' budget within an hour.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from gradtrail.serving.monitoring.metrics import SECONDS
from gradtrail.serving.slo import Objectives, Slo, read_slo
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError

RULES = Path("deploy/prometheus/rules.yaml")
RUNBOOK = "docs/serving_runbook.md"
HEAD = "# Made of deploy/slo.yaml by `python -m gradtrail.serving.monitoring.rules`; a test compares the two.\n"
HOURS = {"5m": 1 / 12, "30m": 0.5, "1h": 1.0, "2h": 2.0, "6h": 6.0, "1d": 24.0, "3d": 72.0}
DRIFT_IMAGES = 500  # in an hour, below which shares of classes say little
CONFIDENCE_DROP = 0.05  # of the mean probability of the predicted class
MODELS = 2  # that a server holds while one replaces the other, or a challenger is tried
PRIMARY = '{role="primary"}'
_INFERENCE = 'route=~"/v2/models/.*/infer|/invocations|/picture"'


@dataclass(frozen=True, kw_only=True)
class Burn:
    """A pair of windows.

    Attributes:
        long: window that has burnt `part` of the budget.
        short: that still burns as fast.
        part: of the error budget.
        severity: `page` where a person must act now, `ticket` where it can wait until morning.
    """

    long: str
    short: str
    part: float
    severity: str

    def rate(self, window_days: int) -> float:
        """Return the burn rate: 1 uses the budget up exactly at the end of the objective's window."""
        return self.part * window_days * 24 / HOURS[self.long]


BURNS = (
    Burn(long="1h", short="5m", part=0.02, severity="page"),
    Burn(long="6h", short="30m", part=0.05, severity="page"),
    Burn(long="1d", short="2h", part=0.1, severity="ticket"),
    Burn(long="3d", short="6h", part=0.1, severity="ticket"),
)


def rules_of(slo: Slo) -> dict[str, Any]:
    """Return the content of a rules file.

    Raises:
        UserError: an objective that cannot be watched; one line that names its key.
    """
    objectives = slo.objectives
    return {
        "groups": [
            {"name": "gradtrail-ratios", "rules": _ratios(objectives)},
            {"name": "gradtrail-objectives", "rules": _burning(objectives)},
            {"name": "gradtrail-server", "rules": _server(slo)},
            {"name": "gradtrail-model", "rules": _model(slo)},
        ]
    }


def text_of(slo: Slo) -> str:
    """Return the rules file as YAML."""
    yaml, text = YAML(), io.StringIO()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(rules_of(slo), text)
    return HEAD + text.getvalue()


def _ratios(objectives: Objectives) -> list[dict[str, Any]]:
    """Shares of bad requests in every window: those refused as too many are bad, mistakes of clients count nowhere."""
    edge = objectives.latency_ms / 1000
    if edge not in SECONDS:
        allowed = ", ".join(f"{1000 * each:g}" for each in SECONDS)
        raise UserError(
            f"deploy/slo.yaml: objectives.latency_ms: {objectives.latency_ms:g} is no bucket; one of {allowed}"
        )
    rules = []
    for window in HOURS:
        bad = _sum(f'gradtrail_request_seconds_count{{{_INFERENCE}, status=~"5..|429"}}', window)
        all_of_them = _sum(f'gradtrail_request_seconds_count{{{_INFERENCE}, status=~"2..|5..|429"}}', window)
        # Without a bad request yet there is no series of one: `or` makes it 0 of those that there are.
        rules.append(_record("errors", window, f"({bad} or 0 * {all_of_them}) / ({all_of_them} > 0)"))
        soon = _sum(f'gradtrail_request_seconds_bucket{{{_INFERENCE}, status=~"2..", le="{float(edge)}"}}', window)
        answered = _sum(f'gradtrail_request_seconds_count{{{_INFERENCE}, status=~"2.."}}', window)
        rules.append(_record("slow", window, f"1 - {soon} / ({answered} > 0)"))
    return rules


def _burning(objectives: Objectives) -> list[dict[str, Any]]:
    watched = (
        ("GradtrailErrorBudgetBurns", "errors", "availability", objectives.availability, "failed"),
        ("GradtrailLatencyBudgetBurns", "slow", "latency_share", objectives.latency_share, "were slow"),
    )
    return [
        _alert(
            name,
            " and ".join(
                f"gradtrail:{metric}:ratio_rate{window} > {_threshold(burn, key, share, objectives.window_days)}"
                for window in (burn.long, burn.short)
            ),
            severity=burn.severity,
            summary=f"{{{{ $value | humanizePercentage }}}} of requests {what} in {burn.long}: "
            f"{burn.rate(objectives.window_days):g} times what {key} {share:g} allows",
            window=burn.long,
        )
        for name, metric, key, share, what in watched
        for burn in BURNS
    ]


def _threshold(burn: Burn, key: str, share: float, window_days: int) -> str:
    value = burn.rate(window_days) * (1 - share)
    if value >= 1:
        least = 1 - 1 / burn.rate(window_days)
        raise UserError(
            f"deploy/slo.yaml: objectives.{key}: {share:g} over {window_days} days cannot be watched within "
            f"{burn.long}; must be above {least:.3f}"
        )
    return f"{value:.6g}"


def _server(slo: Slo) -> list[dict[str, Any]]:
    rules = [
        _alert(
            "GradtrailDown",
            'up{job="gradtrail"} == 0 or absent(up{job="gradtrail"})',
            wait="2m",
            severity="page",
            summary="no server answers Prometheus",
        ),
        _alert("GradtrailNotReady", "gradtrail_ready == 0", wait="5m", severity="page", summary="no model is loaded"),
        _alert(
            "GradtrailRegistryUnreachable",
            "gradtrail_registry_up == 0",
            wait="10m",
            summary="promotions and rollbacks are not picked up; the server goes on with what it has",
        ),
        _alert(
            "GradtrailVersionNotLoaded",
            "increase(gradtrail_follow_failures_total[15m]) > 0",
            summary="the alias names a version that cannot be loaded; the one before it keeps serving",
        ),
        _alert(
            "GradtrailCompiledInRequest",
            "increase(gradtrail_compiles_in_request_total[15m]) > 0",
            summary="a request waited for a compilation, which must never happen",
        ),
    ]
    if slo.limits.cold_start_seconds is not None:
        rules.append(
            _alert(
                "GradtrailSlowStart",
                f"gradtrail_startup_seconds > {slo.limits.cold_start_seconds:g}",
                summary="{{ $value | humanizeDuration }} from start to ready",
            )
        )
    if slo.limits.memory_mib is not None:
        rules.append(
            _alert(
                "GradtrailMemoryHigh",
                f'process_resident_memory_bytes{{job="gradtrail"}} > {MODELS * slo.limits.memory_mib * 2**20:.0f}',
                wait="15m",
                summary="{{ $value | humanize1024 }}B resident",
            )
        )
    return rules


def _model(slo: Slo) -> list[dict[str, Any]]:
    confidence = "gradtrail_prediction_confidence_ratio"
    means = [
        f"{_sum(f'{confidence}_sum{PRIMARY}', window, offset)}"
        f" / ({_sum(f'{confidence}_count{PRIMARY}', window, offset)} > 0)"
        for window, offset in (("1d", " offset 1h"), ("1h", ""))
    ]
    now, before = (_class_shares(*each) for each in (("1h", ""), ("1d", " offset 1h")))
    images = _sum(f"gradtrail_predictions_total{PRIMARY}", "1h")
    enough = f"and on (job) {images} * 3600 > {DRIFT_IMAGES}"
    return [
        _alert(
            "GradtrailCanaryStopped",
            'gradtrail_rollout_state{state="stopped"} == 1',
            summary="the challenger passed a limit of deploy/slo.yaml and gets no more requests; GET /rollout says why",
        ),
        _alert(
            "GradtrailClassDrift",
            f"0.5 * sum by (job) (abs({now} - {before})) > {slo.canary.max_class_share_distance:g}\n{enough}",
            wait="15m",
            summary="shares of predicted classes differ by {{ $value | humanizePercentage }} from the day before",
        ),
        _alert(
            "GradtrailConfidenceDrift",
            f"{means[0]} - {means[1]} > {CONFIDENCE_DROP}\n{enough}",
            wait="15m",
            summary="mean confidence is {{ $value | humanizePercentage }} below that of the day before",
        ),
    ]


def _class_shares(window: str, offset: str) -> str:
    """Each class's share of the primary's answers, over its versions."""
    rate = f"rate(gradtrail_predictions_total{PRIMARY}[{window}]{offset})"
    return f"sum by (job, class) ({rate}) / on (job) group_left () (sum by (job) ({rate}) > 0)"


def _sum(series: str, window: str, offset: str = "") -> str:
    return f"sum by (job) (rate({series}[{window}]{offset}))"


def _record(metric: str, window: str, expression: str) -> dict[str, Any]:
    return {"record": f"gradtrail:{metric}:ratio_rate{window}", "expr": LiteralScalarString(expression)}


def _alert(
    name: str, expression: str, *, summary: str, wait: str = "", severity: str = "ticket", **labels: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": LiteralScalarString(expression),
        **({"for": wait} if wait else {}),
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "runbook_url": f"{RUNBOOK}#{name.lower()}"},
    }


if __name__ == "__main__":
    with atomic_file(RULES) as path:
        path.write_text(text_of(read_slo()), encoding="utf-8")
