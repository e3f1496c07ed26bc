"""The alert rules in docs/monitoring fire when they should, and are silent about runs that are well or have ended."""

import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.support.prometheus import metrics_of
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yaml"
TRIED = ROOT / "tests" / "data" / "alerts_test.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"]
CASES = yaml.safe_load(TRIED.read_text())["tests"]
PROMTOOL = shutil.which("promtool")


def expression(alert):
    (found,) = (rule["expr"] for rule in RULES[0]["rules"] if rule["alert"] == alert)
    return found


@pytest.mark.parametrize(
    ("alert", "clauses"),
    [
        (
            "JaxparNoSteps",
            {"changes(jaxpar_steps_total[30m]) == 0", "jaxpar_steps_total offset 30m >= 0"},
        ),
        (
            "JaxparNoCheckpoints",
            {
                "changes(jaxpar_saves_total[6h]) == 0",
                "increase(jaxpar_steps_total[6h]) > 0",
                "jaxpar_steps_total offset 6h >= 0",
            },
        ),
    ],
)
def test_a_run_fires_neither_before_it_is_as_old_as_the_time_looked_at_nor_after_its_end(
    alert, clauses
):
    assert set(expression(alert).split(" and ")) == clauses | {"jaxpar_steps_total >= 0"}


def test_rules_over_a_range_ask_that_the_run_is_there_now():
    """A range still has the last samples of a run that has ended."""
    over_a_range = [rule["expr"] for rule in RULES[0]["rules"] if "[" in rule["expr"]]
    assert len(over_a_range) == 4
    assert all(expr.endswith(" and jaxpar_steps_total >= 0") for expr in over_a_range)


def test_a_loss_of_infinity_is_not_finite_either():
    parsed = promql_parser.parse(expression("JaxparLossNotFinite"))
    assert {parsed.lhs.prettify(), parsed.rhs.prettify()} == {
        "jaxpar_loss != jaxpar_loss",
        "abs(jaxpar_loss) == Inf",
    }


def metrics_of_series(case):
    return {re.match(r"\w+", given["series"])[0] for given in case["input_series"]}


def test_alerts_are_tried_on_the_metrics_that_they_ask_for():
    """Which a run serves: test_monitoring.py compares them."""
    asked = set().union(*(metrics_of(rule["expr"]) for group in RULES for rule in group["rules"]))
    assert set().union(*map(metrics_of_series, CASES)) == asked


@pytest.mark.parametrize("rule", RULES[0]["rules"], ids=lambda rule: rule["alert"])
def test_every_alert_is_seen_to_fire_and_to_be_silent(rule):
    alone = [
        each
        for case in CASES
        for each in case.get("alert_rule_test", [])
        if each["alertname"] == rule["alert"]
    ]
    assert any(each["exp_alerts"] for each in alone)
    silent = [
        case
        for case in CASES
        for each in case.get("promql_expr_test", [])
        if each["expr"].startswith("count_over_time(ALERTS") and each["exp_samples"] == []
    ]
    assert any(metrics_of(rule["expr"]) <= metrics_of_series(case) for case in silent)


@pytest.mark.skipif(
    PROMTOOL is None, reason="there is no promtool here, which comes with Prometheus"
)
@pytest.mark.parametrize(
    "arguments", [("check", "rules", ALERTS), ("test", "rules", TRIED)], ids=lambda words: words[0]
)
def test_prometheus_own_tool_accepts_the_alerts_and_evaluates_them(arguments):
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["docs/watching.md", "docs/zh/watching.md"])
def test_the_command_of_the_guide_wraps_the_alerts_for_the_operator(page):
    (command,) = re.findall(
        r"^    (\(printf .*\)) \| kubectl apply -f -$", (ROOT / page).read_text(), re.MULTILINE
    )
    wrapped = yaml.safe_load(
        subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS
        ).stdout
    )
    assert wrapped["kind"] == "PrometheusRule"
    assert wrapped["spec"] == {"groups": RULES}
