"""Alerts and dashboard ask for figures that are really exported, and the alerts do fire."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from headwater.producer.api.metrics import ApiMetrics
from headwater.worker.metrics import WorkerMetrics
from prometheus_client import CollectorRegistry

from tests.ops.conftest import OPS

ALERTS = OPS / "prometheus/alerts.yml"
ALERT_TESTS = OPS / "prometheus/alerts_test.yml"
DASHBOARD = OPS / "grafana/dashboards/headwater.json"
TARGET_LABELS = {"job", "instance", "le"}
"""What Prometheus itself knows of a series, and a histogram's own label."""


def _read_yaml(path: Any) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def _rules() -> list[dict[str, Any]]:
    return [rule for group in _read_yaml(ALERTS)["groups"] for rule in group["rules"]]


def _panels() -> list[dict[str, Any]]:
    return list(json.loads(DASHBOARD.read_text("utf-8"))["panels"])


def _exported() -> dict[str, set[str]]:
    """Return the label names of every series that a worker or the HTTP server exports."""
    found: dict[str, set[str]] = {}
    for registry in (WorkerMetrics().registry, ApiMetrics().registry):
        for collector, names in _collectors(registry):
            for name in names:
                found[name] = set(collector._labelnames)
    return found


def _collectors(registry: CollectorRegistry) -> Iterator[tuple[Any, list[str]]]:
    yield from registry._collector_to_names.items()


EXPORTED = _exported()
EXPRESSIONS = [rule["expr"] for rule in _rules()] + [
    target["expr"] for panel in _panels() for target in panel.get("targets", ())
]


def test_the_reading_of_what_is_exported_sees_every_kind() -> None:
    """Counters, gauges and histograms appear under the names that Prometheus scrapes."""
    assert EXPORTED["headwater_jobs_total"] == {"end"}
    assert EXPORTED["headwater_batch_size"] == set()
    assert EXPORTED["headwater_ttft_seconds_bucket"] == set()
    assert "headwater_nothing" not in EXPORTED


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_ask_for_series_and_labels_that_exist(expression: str) -> None:
    """A panel or an alert over a name that nobody exports stays silent for ever."""
    for name, selector in re.findall(r"\b(headwater_\w+)(?:\{([^}]*)\})?", expression):
        assert name in EXPORTED, name
        labels = set(re.findall(r"(\w+)\s*[=!]~?", selector))
        assert labels <= EXPORTED[name] | TARGET_LABELS
    known = {label for name in EXPORTED if name in expression for label in EXPORTED[name]}
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(grouped.replace(",", " ").split()) <= known | TARGET_LABELS


def test_every_legend_names_a_label_of_its_expression() -> None:
    """A legend that names no label would be blank."""
    for panel in _panels():
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                names = {name for part in kept for name in part.replace(",", " ").split()}
                assert label in (names or TARGET_LABELS), target


def test_the_dashboard_names_the_provisioned_datasource_and_has_no_panel_twice() -> None:
    """A panel with another datasource's id shows nothing."""
    (source,) = _read_yaml(OPS / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    shown = [panel for panel in _panels() if panel["type"] != "row"]

    assert {panel["datasource"]["uid"] for panel in shown} == {source["uid"]}
    ids = [panel["id"] for panel in _panels()]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] and panel["targets"] for panel in shown)


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    """Whoever is woken needs a sentence and a severity."""
    for rule in _rules():
        assert rule["alert"].startswith("Headwater")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
    names = [rule["alert"] for rule in _rules()]
    assert len(set(names)) == len(names)


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    """The cases below run only where promtool is; that there is one is checked everywhere."""
    cases = [
        case
        for test in _read_yaml(ALERT_TESTS)["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    ]

    assert sorted(case["alertname"] for case in cases) == sorted(r["alert"] for r in _rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(command: list[str]) -> None:
    """Prometheus' own tool reads the files, and plays every alert's case."""
    done = subprocess.run(
        ["promtool", *command], cwd=OPS / "prometheus", capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
