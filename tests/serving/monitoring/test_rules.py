"""Rules, dashboard and runbook fit the metrics, `deploy/slo.yaml` and each other."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.monitoring.rules import BURNS, HOURS, RULES, rules_of, text_of
from gradtrail.serving.server.app import ROUTES
from gradtrail.serving.slo import Slo, read_slo
from gradtrail.support.errors import UserError

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
METRIC = re.compile(r"\b(?:gradtrail|process)[a-z_]*(?::[a-z_0-9:]+)?")


@pytest.fixture
def slo() -> Slo:
    return read_slo(ROOT / "deploy/slo.yaml")


def rules(slo: Slo) -> list[dict[str, Any]]:
    return [rule for group in rules_of(slo)["groups"] for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    """Every query of the dashboard, with Grafana's variables filled in."""
    for panel in json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            for name, text in (("$__rate_interval", "5m"), ("$__range", "1h"), ("$instance", ".*")):
                target["expr"] = target["expr"].replace(name, text)
            yield target["expr"]


def names(query: str) -> set[str]:
    """Metrics in a query; what stands in quotes or counts what is grouped is none."""
    return set(METRIC.findall(re.sub(r'"[^"]*"', "", query)))


def known(slo: Slo) -> set[str]:
    families = ServerMetrics().registry.collect()
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    made = {family.name + suffix for family in families for suffix in suffixes.get(family.type, [""])}
    return made | {rule["record"] for rule in rules(slo) if "record" in rule}


def test_the_committed_rules_are_those_of_the_committed_slo(slo: Slo) -> None:
    assert (ROOT / RULES).read_text(encoding="utf-8") == text_of(slo), (
        "python -m gradtrail.serving.monitoring.rules writes them"
    )


def test_every_metric_of_the_rules_and_the_dashboard_exists(slo: Slo) -> None:
    queries = [*dashboard_queries(), *(rule["expr"] for rule in rules(slo))]
    asked = set().union(*map(names, queries))
    assert asked - known(slo) == set()
    assert {"gradtrail_request_seconds_bucket", "process_resident_memory_bytes"} <= asked


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = " ".join(dashboard_queries())
    missing = [each.name for each in ServerMetrics().registry.collect() if each.name not in shown]
    assert [name for name in missing if name.startswith("gradtrail")] == []


def test_cold_and_steady_are_apart_on_the_dashboard() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    section, seen = "", dict[str, str]()
    for panel in panels:
        section = panel["title"] if panel["type"] == "row" else section
        seen[section] = seen.get(section, "") + json.dumps(panel.get("targets", []))
    steady, cold = (next(text for name, text in seen.items() if name.startswith(each)) for each in ("Steady", "Cold"))
    assert 'temperature=\\"warm\\"' in steady
    assert "cold" not in steady
    assert 'temperature=\\"cold\\"' in cold
    assert "warm" not in cold


def test_routes_of_the_rules_are_those_that_infer(slo: Slo) -> None:
    pattern = re.search(r'route=~"([^"]*)"', rules(slo)[0]["expr"])
    assert pattern is not None
    matched = {route for route in ROUTES if re.fullmatch(pattern[1], route)}
    assert matched == {route for route in ROUTES if route.endswith("/infer")} | {"/invocations", "/picture"}


def test_every_alert_has_an_entry_in_the_runbook(slo: Slo) -> None:
    text = (ROOT / "docs" / "serving_runbook.md").read_text(encoding="utf-8")
    anchors = {
        "#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }
    alerts = [rule for rule in rules(slo) if "alert" in rule]
    assert len(alerts) > 10
    for rule in alerts:
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (file, f"#{anchor}" in anchors) == ("docs/serving_runbook.md", True), rule["alert"]


def test_burn_rates_are_those_of_the_workbook(slo: Slo) -> None:
    """Table 5-8 of The Site Reliability Workbook: 14.4 and 6 page, 3 and 1 are a ticket, for 30 days."""
    assert [(each.long, each.short, each.severity, round(each.rate(30), 9)) for each in BURNS] == [
        ("1h", "5m", "page", 14.4),
        ("6h", "30m", "page", 6.0),
        ("1d", "2h", "ticket", 3.0),
        ("3d", "6h", "ticket", 1.0),
    ]
    assert all(HOURS[each.long] / HOURS[each.short] == pytest.approx(12) for each in BURNS)
    expressions = [rule["expr"] for rule in rules(slo) if rule.get("alert") == "GradtrailErrorBudgetBurns"]
    assert expressions[0] == "gradtrail:errors:ratio_rate1h > 0.0144 and gradtrail:errors:ratio_rate5m > 0.0144"


def test_an_objective_that_cannot_be_watched_is_refused(slo: Slo) -> None:
    loose = replace(slo, objectives=replace(slo.objectives, availability=0.9))
    with pytest.raises(UserError, match=r"objectives.availability: 0.9 over 30 days .* must be above 0.931"):
        rules_of(loose)
    odd = replace(slo, objectives=replace(slo.objectives, latency_ms=42.0))
    with pytest.raises(UserError, match=r"objectives.latency_ms: 42 is no bucket; one of 1, 2, 3, 5, 7.5, 10"):
        rules_of(odd)


def test_what_is_not_judged_is_not_watched(slo: Slo) -> None:
    without = replace(slo, limits=replace(slo.limits, memory_mib=None, cold_start_seconds=None))
    left = {rule.get("alert") for rule in rules(without)}
    assert {rule.get("alert") for rule in rules(slo)} - left == {"GradtrailMemoryHigh", "GradtrailSlowStart"}


def test_every_alert_is_tested(slo: Slo) -> None:
    tested = "".join(path.read_text() for path in (DEPLOY / "prometheus").glob("tests*.yaml"))
    for rule in rules(slo):
        assert f"alertname: {rule.get('alert', '')}" in tested


@NEEDS_PROMTOOL
def test_promtool_accepts_rules_scrape_config_and_queries(slo: Slo, tmp_path: Path) -> None:
    for check in (["rules", "rules.yaml"], ["config", "prometheus.yaml"]):
        promtool("check", *check)
    queries = [
        f"      - record: a:b:c{number}\n        expr: {json.dumps(query)}\n"
        for number, query in enumerate(dashboard_queries())
    ]
    (tmp_path / "queries.yaml").write_text("groups:\n  - name: dashboard\n    rules:\n" + "".join(queries))
    promtool("check", "rules", str(tmp_path / "queries.yaml"))


@pytest.mark.slow
@NEEDS_PROMTOOL
@pytest.mark.parametrize("file", ["tests.yaml", "tests_of_drift.yaml"])
def test_alerts_fire_when_they_should(file: str) -> None:
    promtool("test", "rules", file)


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
