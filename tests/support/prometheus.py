"""What `promtool check rules` checks of a file of alert rules, and the names of the metrics that a query asks for."""

import re
import urllib.request

import promql_parser
import yaml

from tests.support.waiting import WAIT_SECONDS

DURATION = re.compile(r"(?=\d)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
GROUP = {
    "name": str,
    "interval": str,
    "query_offset": str,
    "limit": int,
    "labels": dict,
    "rules": list,
}
RULE = {
    "alert": str,
    "record": str,
    "expr": str,
    "for": str,
    "keep_firing_for": str,
    "labels": dict,
    "annotations": dict,
}
# Of Go's templates what alerts need: a label or the value, through functions of Prometheus.
FUNCTION = r'(humanize|humanize1024|humanizeDuration|humanizePercentage|humanizeTimestamp|title|toUpper|toLower|printf "[^"]*")'
VALUE = rf"(\$labels\.{LABEL.pattern}|\$value)"
ACTION = re.compile(rf"\s*(or\s+{VALUE}\s+)?{VALUE}(\s*\|\s*{FUNCTION})*\s*")


def metrics_of(query):
    """Returns the names of the metrics that a query of Prometheus, or of a variable of Grafana, asks for.

    Of names that are given by a pattern it returns the pattern.
    """
    if asked := re.fullmatch(r"label_values\((.*), *\w+\)", query):
        query = asked[1]
    found = set()

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            by_pattern = {each.value for each in node.matchers.matchers if each.name == "__name__"}
            found.update({node.name} if node.name else by_pattern)
        if isinstance(node, promql_parser.MatrixSelector):
            found.add(node.vector_selector.name)
        return True

    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "1m")), visit)
    return found


def problems(text):
    """Returns a message for each thing in a file of rules that Prometheus would refuse."""
    read = yaml.safe_load(text)
    if not isinstance(read, dict) or set(read) != {"groups"}:
        return ["a file has groups, and nothing else"]
    found, names = [], []
    for group in read["groups"]:
        found += _fields(group, GROUP, {"name"}, "group")
        names.append(group.get("name"))
        seen = []
        for rule in group.get("rules", []):
            found += _rule(rule)
            seen.append(
                (rule.get("alert", rule.get("record")), sorted(rule.get("labels", {}).items()))
            )
        found += [
            f"rule {name} is there twice" for name, labels in seen if seen.count((name, labels)) > 1
        ]
    return found + [f"group {name} is there twice" for name in set(names) if names.count(name) > 1]


def _fields(given, known, needed, what):
    wrong = [f"{what} has no field {name}" for name in given if name not in known]
    wrong += [
        f"{name} of a {what} is {value!r}"
        for name, value in given.items()
        if not isinstance(value, known.get(name, object))
    ]
    return wrong + [f"{what} needs {name}" for name in needed - set(given)]


def _rule(rule):
    name = rule.get("alert", rule.get("record"))
    wrong = _fields(rule, RULE, {"expr"}, f"rule {name}")
    if ("alert" in rule) == ("record" in rule):
        wrong.append(f"rule {name} must be an alert or a record")
    for field in ("for", "keep_firing_for"):
        if not DURATION.fullmatch(str(rule.get(field, "1m"))):
            wrong.append(f"{field} of {name} is no duration")
    try:
        promql_parser.parse(str(rule.get("expr", "")))
    except ValueError as error:
        wrong.append(f"expr of {name}: {error}")
    for part in ("labels", "annotations"):
        for label, value in rule.get(part, {}).items():
            if not LABEL.fullmatch(label) or (
                part == "labels" and label in ("__name__", "alertname")
            ):
                wrong.append(f"{label} is no name for one of the {part} of {name}")
            if not isinstance(value, str):
                wrong.append(f"{label} of {name} is not text")
            elif not _is_template(value):
                wrong.append(f"{label} of {name} is no template: {value}")
    return wrong


def _is_template(text):
    actions = re.findall(r"{{(.*?)}}", text)
    rest = re.sub(r"{{.*?}}", "", text)
    return "{{" not in rest and "}}" not in rest and all(map(ACTION.fullmatch, actions))


def scrape(port):
    """Returns what ``curl`` of the port shows, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.split()[0]: float(line.split()[1]) for line in lines}
