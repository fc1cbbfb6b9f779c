"""The metrics of a server; alerts, dashboard and docs/deploying.md fit them, `deploy/slo.yaml` and each other."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML
from starlette.routing import Route

from gradtrail.serving.metrics import OUTCOMES, SLOW_SECONDS, ServerMetrics, Temperature, count_compilations
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.middleware import RequestLimits
from gradtrail.serving.server.router import Router
from gradtrail.serving.slo import read_slo

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
NEEDS_AMTOOL = pytest.mark.skipif(shutil.which("amtool") is None, reason="apt-get install prometheus-alertmanager")
GROUPS = YAML(typ="safe", pure=True).load(DEPLOY / "prometheus" / "rules.yaml")["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PARSING_MIB = 384  # of the values of one JSON of 16 MiB (335 MiB for images of 224 × 224 × 3), or one large picture
METRIC = re.compile(r"\b(?:gradtrail|process)[a-z_]*(?::[a-z_0-9:]+)?")
ALERTMANAGER = DEPLOY / "prometheus" / "alertmanager.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def existing_metrics() -> set[str]:
    families = ServerMetrics(price_per_hour=1.0).registry.collect()
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    accelerator = {
        f"gradtrail_accelerator_{name}" for name in ("memory_bytes", "memory_limit_bytes", "utilization_ratio")
    }
    made = accelerator | {family.name + suffix for family in families for suffix in suffixes.get(family.type, [""])}
    return made | {rule["record"] for rule in RULES if "record" in rule}


def test_every_metric_of_the_rules_and_the_dashboard_exists() -> None:
    queries = " ".join([*QUERIES, *(rule["expr"] for rule in RULES)])
    queried = {*METRIC.findall(re.sub(r'"[^"]*"', "", queries))}  # quoted text names no metric
    assert queried - existing_metrics() == set()
    assert {"gradtrail_request_seconds_bucket", "process_resident_memory_bytes"} <= queried


def test_routes_that_classify_take_posts_and_are_those_of_the_dashboard() -> None:
    (pattern,) = {*re.findall(r'route=~"([^"]*)"', " ".join(QUERIES))}
    routes = create_app(Router(batching=BatchingConfig(), metrics=ServerMetrics())).routes
    paths = {route.path: "POST" in (route.methods or ()) for route in routes if isinstance(route, Route)}
    assert {path for path in paths if re.fullmatch(pattern, path)} == {path for path in paths if paths[path]}


def test_every_alert_is_tested_and_has_an_entry_in_the_runbook() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text() for path in (DEPLOY / "prometheus").glob("tests*.yaml"))
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in RULES if "alert" in rule}
    assert len(alerts) > 10
    for name, url in alerts.items():
        assert url == f"docs/deploying.md#{name.lower()}"
        assert f"\n### {name}\n" in page
        assert f"alertname: {name}\n" in tests


def test_thresholds_are_burn_rates_times_budgets() -> None:
    """Burn rates of table 5-8 of The Site Reliability Workbook; a short window is a twelfth of its long one."""
    budgets = {"failed": ("GradtrailErrorBudgetBurns", 0.001), "slow": ("GradtrailLatencyBudgetBurns", 0.01)}
    burns = (("1h", "5m", "page", 14.4), ("6h", "30m", "page", 6), ("1d", "2h", "ticket", 3), ("3d", "6h", "ticket", 1))
    for outcome, (alert, budget) in budgets.items():
        expected = [
            (
                " and ".join(
                    f'gradtrail:requests:share{window}{{outcome="{outcome}"}} > {rate * budget:.6g}'
                    for window in (long, short)
                ),
                {"severity": severity, "window": long},
            )
            for long, short, severity, rate in burns
        ]
        assert [(rule["expr"], rule["labels"]) for rule in RULES if rule.get("alert") == alert] == expected


def test_two_models_and_all_requests_fit_below_the_alert_and_the_alert_fires_below_the_limits_that_kill() -> None:
    limits, yaml = read_slo(DEPLOY / "slo.yaml").limits, YAML(typ="safe", pure=True)
    expressions = {rule.get("alert"): rule["expr"] for rule in RULES}
    assert expressions["GradtrailSlowStart"].endswith(f"> {limits.cold_start_seconds:g}")

    deployment = next(yaml.load_all(DEPLOY / "kubernetes" / "server.yaml"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    server = yaml.load(DEPLOY / "server.compose.yaml")["services"]["server"]
    assert container["resources"]["limits"]["memory"].removesuffix("Mi") == server["mem_limit"].removesuffix("m")
    used = 2 * limits.memory_mib + RequestLimits.max_total_bytes / 2**20
    alert, killed = int(expressions["GradtrailMemoryHigh"].split()[-1]) / 2**20, int(server["mem_limit"][:-1])
    assert used + PARSING_MIB <= alert <= killed - 256


def test_objectives_are_the_limits_that_make_an_answer_slow() -> None:
    text = (DEPLOY / "prometheus" / "rules.yaml").read_text()
    for alert, temperature in (("latency_share", "warm"), ("of first answers, which", "cold")):
        (line,) = (line for line in text.splitlines() if line.startswith("#") and alert in line)
        assert line.rstrip(".").endswith(f"{1000 * SLOW_SECONDS[temperature]:g} ms")


def test_alertmanager_holds_back_tickets_while_versions_change_and_never_pages() -> None:
    config = YAML(typ="safe", pure=True).load(ALERTMANAGER)
    severities = {rule["labels"]["severity"] for rule in RULES if "alert" in rule}
    routes = {route["matchers"][0]: route["receiver"] for route in config["route"]["routes"]}
    routed = {one: routes.get(f'severity="{one}"', config["route"]["receiver"]) for one in severities}
    assert routed == {one: one for one in ("page", "ticket", "none")}
    assert {*routed.values()} == {receiver["name"] for receiver in config["receivers"]}
    (silent,) = (rule["alert"] for rule in RULES if rule.get("labels", {}).get("severity") == "none")
    rules = {rule["source_matchers"][0]: (rule["target_matchers"], rule["equal"]) for rule in config["inhibit_rules"]}
    assert rules == {
        f'alertname="{silent}"': (['severity="ticket"', 'alertname!="GradtrailCompiledInRequest"'], ["job"]),
        'severity="page"': (['severity="ticket"'], ["job", "alertname"]),
    }


@NEEDS_AMTOOL
def test_amtool_accepts_alertmanager() -> None:
    done = subprocess.run(["amtool", "check-config", ALERTMANAGER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_promtool_accepts_rules_scrape_config_and_queries(tmp_path: Path) -> None:
    for check in (["rules", "rules.yaml"], ["config", "prometheus.yaml"]):
        promtool("check", *check)
    rules = "groups:\n  - name: dashboard\n    rules:\n" + "".join(
        f"      - record: a:b:c{number}\n        expr: {json.dumps(query)}\n" for number, query in enumerate(QUERIES)
    )
    for name, value in (("$__rate_interval", "5m"), ("$__range", "1h"), ("$instance", ".*")):  # variables of Grafana
        rules = rules.replace(name, value)
    (tmp_path / "queries.yaml").write_text(rules)
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


@pytest.mark.parametrize(
    ("status", "seconds", "temperature", "outcome"),
    [
        (200, 0.05, "warm", "answered"),
        (200, 0.051, "warm", "slow"),
        (200, 0.25, "cold", "answered"),
        (200, 0.251, "cold", "slow"),
        (400, 1, "warm", "refused"),
        (429, 0, "warm", "failed"),
        (504, 30, "warm", "failed"),
    ],
)
def test_request_has_one_outcome(status: int, seconds: float, temperature: Temperature, outcome: str) -> None:
    metrics = ServerMetrics()
    metrics.count_request(status, seconds, temperature)
    series = [*itertools.product(OUTCOMES, ("warm", "cold"))]
    counts = {one: value(metrics, "gradtrail_requests_total", outcome=one[0], temperature=one[1]) for one in series}
    assert counts == dict.fromkeys(series, 0.0) | {(outcome, temperature): 1.0}


def test_cost_is_the_price_of_the_time_since_the_start_over_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.serving.metrics.seconds_running", lambda: 1800.0)
    metrics = ServerMetrics(price_per_hour=3.0)
    assert math.isnan(value(metrics, "gradtrail_cost_per_thousand_answers") or 0)
    for status in (200, 200, 200, 200, 429, 400):
        metrics.count_request(status, 1.0, "warm")
    assert value(metrics, "gradtrail_cost_per_thousand_answers") == 3.0 * 0.5 / 4 * 1000
    assert value(ServerMetrics(), "gradtrail_cost_per_thousand_answers") is None


def test_accelerator_has_series_only_where_jax_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = ServerMetrics()

    def series() -> dict[str, float]:
        prefix = "gradtrail_accelerator_"
        return {name.removeprefix(prefix): one for (name, _), one in values(metrics).items() if name.startswith(prefix)}

    nvml = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=10 * gpu),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=7),
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,1")
    metrics.serving("primary", "digits", "1", "digest")
    assert series() == {}, "a CPU"
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 5, "bytes_limit": 9})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert series() == {"memory_bytes": 5, "memory_limit_bytes": 9, "utilization_ratio": 0.4}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "utilization_ratio" not in series(), "NVML has none of a part of a GPU"
    metrics.unloaded("primary")
    assert series() == {}, "before a model is loaded, JAX must not look for devices"


def test_hundred_promotions_leave_the_series_of_one_version() -> None:
    metrics = ServerMetrics()
    metrics.classes = ["zero", "one"]
    metrics.serving("primary", "digits", "0", "digest")
    before = len(values(metrics))
    for number in range(1, 101):
        metrics.serving("primary", "digits", str(number), "digest")
        metrics.answered("primary", str(number), 0.001, [0], [0.5])
        metrics.answered("primary", str(number - 1), 0.001, [0], [0.5])
        metrics.failed("primary", str(number - 1), ValueError())
    assert len(values(metrics)) == before
    assert value(metrics, "gradtrail_model_swaps_total", role="primary") == 100
    metrics.unloaded("primary")
    left = {name for name, labels in values(metrics) if ("role", "primary") in labels}
    assert left == {"gradtrail_model_swaps_total", "gradtrail_follow_failures_total"}


@NEEDS_PROMTOOL
def test_promtool_accepts_the_names() -> None:
    metrics = ServerMetrics()
    for metric in metrics.registry._names_to_collectors.values():
        if labels := getattr(metric, "_labelnames", ()):
            metric.labels(*labels)  # type: ignore[attr-defined] # a series; without one there is nothing to check
    text = generate_latest(metrics.registry)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_compilations_in_answering_threads_are_counted_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics()
    images = np.ones(3, np.float32)
    end = count_compilations(metrics, "model")
    try:
        ahead = jax.jit(lambda x: x * 2).lower(images).compile()
        with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
            thread.submit(ahead, images).result()
            assert value(metrics, "gradtrail_compiles_in_request_total") == 0, "the program was compiled before"
            triple = jax.jit(lambda x: x * 3)
            thread.submit(triple, images).result()
            assert value(metrics, "gradtrail_compiles_in_request_total") == 1
            thread.submit(triple, images[:2]).result()
    finally:
        end()
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        thread.submit(jax.jit(lambda x: x * 5), images).result()
    assert value(metrics, "gradtrail_compiles_in_request_total") == 2
    first, again = caplog.messages
    assert first.startswith("during a request <lambda> was compiled by a call at ")
    assert again.endswith("argument 1 (`x`) has shape (2,), was (3,)")
