"""Alerts and dashboard: of metrics that there are, and of sections that help."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.promql import faults
from places import COMPOSE, ROOT, compose

from diloco_coordinator.api.metrics_io import _COUNTERS
from diloco_shared.process.health import _SPEEDS

PLACE = COMPOSE / "observability"
EXPORTING = (
    "services/coordinator/diloco_coordinator/api/metrics_io.py",
    "services/syncer/diloco_syncer/app.py",
    "services/learner/diloco_learner/app.py",
    "shared/diloco_shared/process/health.py",
    "shared/diloco_shared/process/loop_watch.py",
)
# Names that the code makes of parts.
MADE = {
    "diloco_{name}": list(_COUNTERS),
    "diloco_learner_{name}": [name for name, _, _ in _SPEEDS],
}
# Prometheus' own.
BUILT_IN = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate"}}
SCRAPED = {"job", "instance"}


def _called(node: ast.AST) -> tuple[str, ast.expr, set[str]] | None:
    """(kind, name, labels) of a call that makes a family of metrics."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return None
    if not node.func.id.endswith("MetricFamily"):
        return None
    labels = next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "labels"), [])
    return node.func.id, node.args[0], set(labels)


@cache
def exported() -> dict[str, set[str]]:
    """Names as Prometheus stores them, with the labels that any process gives them."""
    found: dict[str, set[str]] = {}
    for file in EXPORTING:
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            if (called := _called(node)) is None:
                continue
            kind, name, labels = called
            names = [ast.literal_eval(name)] if isinstance(name, ast.Constant) else _made(name)
            for each in names:
                stored = f"{each}_total" if kind == "CounterMetricFamily" else each
                found[stored] = found.get(stored, set()) | labels
    return found


def _made(name: ast.expr) -> list[str]:
    form = ast.unparse(name).removeprefix("f").strip("'\"")
    return [form.replace("{name}", each) for each in MADE[form]]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PLACE / "rules.yaml").read_text("utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PLACE / "dashboards" / "diloco.json").read_text("utf-8"))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)"""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        yield variable["name"], variable["query"]["query"]


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Metrics of an expression, and the labels by which they are chosen."""
    for name, chosen in re.findall(r"\b(diloco_\w+|up|ALERTS)\b(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*[=!]", chosen))


def test_the_code_is_read_as_it_is() -> None:
    """Or whatever follows would look at nothing."""
    assert {
        "diloco_members",
        "diloco_rounds_committed_total",
        "diloco_learner_mfu",
    } <= exported().keys()
    assert {"diloco_loop_held_seconds_total", "diloco_steps_skipped_total"} <= exported().keys()
    assert exported()["diloco_refused_total"] == {"run", "reason", "kind"}


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_every_metric_and_label_is_exported(where: str, expression: str) -> None:
    names = list(used(expression))
    assert names, where
    for name, chosen in names:
        labels = BUILT_IN.get(name) or exported()[name] | SCRAPED
        assert chosen <= labels, f"{where}: {name} has no {chosen - labels}"


# What the dashboard asks of Grafana: which values a label has.
_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_every_expression_is_sound_as_far_as_can_be_seen_here(where: str, expression: str) -> None:
    """Prometheus' own tool sees more, and is not everywhere."""
    metrics = BUILT_IN | {name: labels | SCRAPED for name, labels in exported().items()}
    if asked := _VALUES.fullmatch(expression):
        expression = asked[1]
        assert asked[2] in metrics[expression]
    assert not faults(expression, metrics), where


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ('sum by (run) (rate(diloco_a{run=~"$run"}[5m])) > 0.2 unless on (run) up == 1', ""),
        ("diloco_a / on (run) group_left sum by (run) (diloco_a offset 5m) or vector(0)", ""),
        ("sum(rate(diloco_a[5m])", "( stays open"),
        ("rate(diloco_a[5m)])", ") closes nothing"),
        ('diloco_a{run="a}', 'unreadable: "a}'),
        ("rat(diloco_a[5m])", "rat is nothing that there is here"),
        ("up + node_load1", "node_load1 is nothing that there is here"),
        ("diloco_a unles on (run) up", "unles is nothing that there is here"),
        ('diloco_a{member="a"}', "member is nothing that there is here"),
        ("sum by (member) (diloco_a)", "member is nothing that there is here"),
        ("sum diloco_a", "sum is nothing that there is here"),
        ("rate diloco_a", "rate is nothing that there is here"),
    ],
)
def test_an_expression_that_is_wrong_is_seen(expression: str, wrong: str) -> None:
    metrics = {"diloco_a": {"run", "job"}, "up": {"run", "job"}}
    assert faults(expression, metrics)[:1] == ([wrong] if wrong else [])


def test_a_metric_that_is_not_there_would_be_seen() -> None:
    ((name, chosen),) = used('rate(diloco_rouns_total{run="a"}[5m])')
    assert name not in exported() and chosen == {"run"}


def anchors(page: Path) -> set[str]:
    """Of its headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_it_means_and_where_help_is(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    told = rule["annotations"]
    assert told.keys() == {"summary", "description", "runbook_url"}
    for text in (told["summary"], told["description"]):
        assert text[0].isupper() or text.startswith("{{"), text
    page, _, anchor = told["runbook_url"].partition("#")
    assert anchor in anchors(ROOT / page)
    assert re.search(rf"`{rule['alert']}`", (ROOT / page).read_text("utf-8")), "the page names it"


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_prometheus_reads_where_the_processes_answer() -> None:
    config = yaml.safe_load((PLACE / "prometheus.yaml").read_text("utf-8"))
    ours = compose("compose.yaml")
    for job in config["scrape_configs"]:
        environment = ours[job["job_name"]]["environment"]
        ways = ("static_configs", "dns_sd_configs")
        assert sum(bool(job.get(way)) for way in ways) == 1, "or this job reads nobody"
        for found in job.get("static_configs", ()):
            # Its API answers who has no token with 401.
            assert found["targets"] == [f"coordinator:{environment['DILOCO_HEALTH_PORT']}"]
            assert environment["DILOCO_HEALTH_HOST"] == "0.0.0.0"
        for found in job.get("dns_sd_configs", ()):
            assert found["names"] == [job["job_name"]]
            assert found["port"] == int(environment["DILOCO_HEALTH_PORT"])
    assert {j["job_name"] for j in config["scrape_configs"]} == {"coordinator", "syncer", "learner"}
    mounts = dict(v.split(":")[:2] for v in compose("observability.yaml")["prometheus"]["volumes"])
    assert set(config["rule_files"]) <= set(mounts.values())


def test_the_dashboard_is_whole_and_its_panels_lie_side_by_side() -> None:
    found = dashboard()
    source = yaml.safe_load((PLACE / "grafana/datasources/prometheus.yaml").read_text("utf-8"))
    uid = source["datasources"][0]["uid"]
    taken: set[tuple[int, int]] = set()
    assert len(found["panels"]) >= 12
    assert len({p["id"] for p in found["panels"]}) == len(found["panels"])
    for panel in found["panels"]:
        assert panel["datasource"]["uid"] == uid and panel["description"].endswith(".")
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    grafana = compose("observability.yaml")["grafana"]
    mounts = dict(v.split(":")[:2] for v in grafana["volumes"])
    for source_path in list(mounts)[:2]:
        assert (COMPOSE / source_path).is_dir()
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{mounts['./observability/dashboards']}/diloco.json"


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: the package prometheus)")
    return found


def test_prometheus_own_tool_takes_the_rules_and_they_do_as_they_say(
    promtool: str, tmp_path: Path
) -> None:
    for source in (PLACE / "rules.yaml", Path(__file__).parent / "alerts.yaml"):
        shutil.copy(source, tmp_path)
    config = (PLACE / "prometheus.yaml").read_text("utf-8")
    (tmp_path / "prometheus.yaml").write_text(config.replace("/etc/prometheus/", ""))
    panels = [
        {"record": f"panel:{number}", "expr": expression.replace("$run", ".*")}
        for number, (_, expression) in enumerate(expressions())
        if "label_values" not in expression
    ]
    (tmp_path / "panels.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]})
    )
    for command in (
        ["check", "config", "prometheus.yaml"],
        ["check", "rules", "rules.yaml", "panels.yaml"],
        ["test", "rules", "alerts.yaml"],
    ):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
