"""The metrics of a server; rules, dashboard and runbook fit them, `deploy/slo.yaml` and each other."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML
from starlette.routing import Route

from gradtrail.serving.metrics import ServerMetrics, count_compilations
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.router import Router
from gradtrail.serving.slo import read_slo

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
RULES = [
    rule
    for group in YAML(typ="safe", pure=True).load(DEPLOY / "prometheus" / "rules.yaml")["groups"]
    for rule in group["rules"]
]
METRIC = re.compile(r"\b(?:gradtrail|process)[a-z_]*(?::[a-z_0-9:]+)?")


def dashboard_queries() -> Iterator[str]:
    """Every query of the dashboard, with Grafana's variables filled in."""
    for panel in json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            for name, text in (("$__rate_interval", "5m"), ("$__range", "1h"), ("$instance", ".*")):
                target["expr"] = target["expr"].replace(name, text)
            yield target["expr"]


def names(query: str) -> set[str]:
    """Metrics in a query; quoted text is none."""
    return set(METRIC.findall(re.sub(r'"[^"]*"', "", query)))


def existing_metrics() -> set[str]:
    families = ServerMetrics().registry.collect()
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    made = {family.name + suffix for family in families for suffix in suffixes.get(family.type, [""])}
    return made | {rule["record"] for rule in RULES if "record" in rule}


def test_every_metric_of_the_rules_and_the_dashboard_exists() -> None:
    queries = [*dashboard_queries(), *(rule["expr"] for rule in RULES)]
    queried = set().union(*map(names, queries))
    assert queried - existing_metrics() == set()
    assert {"gradtrail_request_seconds_bucket", "process_resident_memory_bytes"} <= queried


def test_every_metric_is_on_the_dashboard() -> None:
    queries = " ".join(dashboard_queries())
    names = [family.name for family in ServerMetrics().registry.collect() if family.name.startswith("gradtrail")]
    assert [name for name in names if name not in queries] == []


def test_dashboard_separates_cold_and_warm_requests() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    section, sections = "", dict[str, str]()
    for panel in panels:
        section = panel["title"].split()[0].strip(":") if panel["type"] == "row" else section
        sections[section] = sections.get(section, "") + json.dumps(panel.get("targets", []))
    steady, cold = sections["Steady"], sections["Cold"]
    assert 'temperature=\\"warm\\"' in steady
    assert "cold" not in steady
    assert 'temperature=\\"cold\\"' in cold
    assert "warm" not in cold


def test_rules_count_the_routes_that_classify() -> None:
    pattern = re.search(r'route=~"([^"]*)"', RULES[0]["expr"])
    assert pattern is not None
    routes = create_app(Router(batching=BatchingConfig(), metrics=ServerMetrics())).routes
    paths = {route.path: "POST" in (route.methods or ()) for route in routes if isinstance(route, Route)}
    assert {path for path in paths if re.fullmatch(pattern[1], path)} == {path for path in paths if paths[path]}


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    text = (ROOT / "docs" / "serving_runbook.md").read_text(encoding="utf-8")
    anchors = {
        "#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len(alerts) > 10
    for rule in alerts:
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (file, f"#{anchor}" in anchors) == ("docs/serving_runbook.md", True), rule["alert"]


def test_thresholds_are_burn_rates_times_budgets() -> None:
    """Burn rates of table 5-8 of The Site Reliability Workbook; a short window is a twelfth of its long one."""
    budgets = {"errors": ("GradtrailErrorBudgetBurns", 0.001), "slow": ("GradtrailLatencyBudgetBurns", 0.01)}
    burns = (("1h", "5m", "page", 14.4), ("6h", "30m", "page", 6), ("1d", "2h", "ticket", 3), ("3d", "6h", "ticket", 1))
    for metric, (alert, budget) in budgets.items():
        expected = [
            (
                " and ".join(
                    f"gradtrail:{metric}:ratio_rate{window} > {rate * budget:.6g}" for window in (long, short)
                ),
                {"severity": severity, "window": long},
            )
            for long, short, severity, rate in burns
        ]
        assert [(rule["expr"], rule["labels"]) for rule in RULES if rule.get("alert") == alert] == expected


def test_limits_of_the_verdict_are_those_of_the_alerts() -> None:
    limits = read_slo(DEPLOY / "slo.yaml").limits
    expressions = {rule.get("alert"): rule["expr"] for rule in RULES}
    assert expressions["GradtrailSlowStart"].endswith(f"> {limits.cold_start_seconds:g}")
    assert expressions["GradtrailMemoryHigh"].endswith(f"> {2 * limits.memory_mib * 2**20:.0f}")


def test_every_alert_is_tested() -> None:
    tested = "".join(path.read_text() for path in (DEPLOY / "prometheus").glob("tests*.yaml"))
    for rule in RULES:
        assert f"alertname: {rule.get('alert', '')}" in tested


@NEEDS_PROMTOOL
def test_promtool_accepts_rules_scrape_config_and_queries(tmp_path: Path) -> None:
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


INFER = "/v2/models/{name}/infer"


def values(metrics: ServerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, as a scraper reads it."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return values(metrics).get((name, frozenset(labels.items())))


def filled() -> ServerMetrics:
    """Metrics with a value in every series."""
    metrics = ServerMetrics()
    metrics.classes = ["zero", "one"]
    metrics.ready.set(1)
    metrics.startup_seconds.set(1.5)
    metrics.serving("primary", "digits", "1", "a" * 64)
    metrics.serving("challenger", "digits", "2", "b" * 64)
    metrics.compile_seconds.labels("8", "miss").observe(0.3)
    metrics.compile_seconds.labels("8", "hit").observe(0.03)
    metrics.request_seconds.labels(INFER, "200", "cold").observe(0.004)
    metrics.request_seconds.labels(INFER, "200", "warm").observe(0.002)
    metrics.errors.labels("timeout").inc()
    metrics.queue_requests.set(3)
    metrics.queue_wait_seconds.observe(0.001)
    metrics.batch_fill.labels("8").observe(6 / 8)
    metrics.answered("primary", "1", 0.002, [0, 1, 1], [0.9, 0.8, 0.7])
    metrics.failed("challenger", "2")
    metrics.compared_images.labels("agreed").inc(9)
    metrics.comparisons_dropped.inc()
    metrics.canary_fallbacks.inc()
    metrics.canary_stops.labels("errors").inc()
    metrics.rollout("stopped")
    metrics.registry_up.set(0)
    metrics.follow_failures.labels("challenger").inc()
    return metrics


def test_hundred_promotions_leave_the_series_of_one_version() -> None:
    metrics = ServerMetrics()
    metrics.classes = ["zero", "one"]
    metrics.serving("primary", "digits", "0", "digest")
    before = len(values(metrics))
    for number in range(1, 101):
        metrics.serving("primary", "digits", str(number), "digest")
        metrics.answered("primary", str(number), 0.001, [0], [0.5])
        metrics.answered("primary", str(number - 1), 0.001, [0], [0.5])
        metrics.failed("primary", str(number - 1))
    assert len(values(metrics)) == before
    assert value(metrics, "gradtrail_model_swaps_total", role="primary") == 100
    metrics.unloaded("primary")
    left = {name for name, labels in values(metrics) if ("role", "primary") in labels}
    assert left == {"gradtrail_model_swaps_total", "gradtrail_follow_failures_total"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus")
def test_promtool_accepts_the_names() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(filled().registry), capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_compilations_in_answering_threads_are_counted() -> None:
    metrics = ServerMetrics()
    images = np.ones(3, np.float32)
    end = count_compilations(metrics, "model")
    try:
        ahead = jax.jit(lambda x: x * 2).lower(images).compile()
        with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
            thread.submit(ahead, images).result()
            assert value(metrics, "gradtrail_compiles_in_request_total") == 0, "the program was compiled before"
            thread.submit(jax.jit(lambda x: x * 3), images).result()
            assert value(metrics, "gradtrail_compiles_in_request_total") == 1
    finally:
        end()
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        thread.submit(jax.jit(lambda x: x * 5), images).result()
    assert value(metrics, "gradtrail_compiles_in_request_total") == 1
