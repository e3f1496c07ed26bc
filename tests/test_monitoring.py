"""The alert rules and the dashboard in docs/monitoring ask for metrics that runs serve, and for nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxpar.__main__ import main
from jaxpar.jobs import Job, remarks, to_jobset, to_podmonitor, to_trainjob
from jaxpar.jobs.job import JobSettings
from jaxpar.metrics.exporters import PrometheusExporter
from jaxpar.metrics.log import MetricsLog
from tests.support.prometheus import metrics_of, problems
from tests.support.waiting import WAIT_SECONDS

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
TEXT = (FOLDER / "alerts.yaml").read_text()
RULES = yaml.safe_load(TEXT)["groups"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ITEMS = ("tokens", "rows", "digits", "steps")  # the last of scripts that name none
SERVED = Job(
    name="gpt", image="a:1", command=("recipes/gpt.py",), data=2, tensor=8, metrics_port=9090
)


def queries():
    yield from (rule["expr"] for group in RULES for rule in group["rules"])
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    yield from (
        variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if "definition" in variable
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The names that a run serves, for the items of each recipe and with the columns of gpt.py."""
    import urllib.request

    names = set()
    for items in ITEMS:
        exporter = PrometheusExporter(0, flops_per_step=1e9, peak_flops=1e15)
        folder = tmp_path_factory.mktemp(items)
        with MetricsLog(folder, 2, items_per_step=8, items=items, watchers=[exporter]) as log:
            for step in range(2):
                log.log(step, {"loss": 1.0, "grad_norm": 2.0, "skipped": 0.0, "test_loss": 1.5})
            log.flush()
            address = f"http://127.0.0.1:{exporter.port}/metrics"
            with urllib.request.urlopen(address, timeout=WAIT_SECONDS) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                names |= {sample.name for family in families for sample in family.samples}
    return names


def test_queries_name_metrics_that_a_run_serves(served):
    asked = {name for query in queries() for name in metrics_of(query)}
    unknown = {name for name in asked if not any(re.fullmatch(name, each) for each in served)}
    assert unknown == set()
    assert len(asked) > 8


def test_the_panel_of_the_rate_has_that_of_items_of_any_name():
    (panel,) = (panel for panel in DASHBOARD["panels"] if panel["title"] == "Rate")
    asked = [name for target in panel["targets"] for name in metrics_of(target["expr"])]
    for items in (*ITEMS, "images_2"):
        assert any(re.fullmatch(name, f"jaxpar_{items}_per_second") for name in asked), items


def test_every_counter_and_the_loss_are_watched():
    asked = " ".join(rule["expr"] for group in RULES for rule in group["rules"])
    for name in (
        "jaxpar_steps_total",
        "jaxpar_skipped_steps_total",
        "jaxpar_saves_total",
        "jaxpar_loss",
        "jaxpar_goodput",
    ):
        assert name in asked


def test_prometheus_accepts_the_file_of_rules():
    assert problems(TEXT) == []
    assert len(RULES) == 1
    assert len(RULES[0]["rules"]) > 5


def test_every_alert_says_how_severe_it_is_and_what_to_do():
    for rule in RULES[0]["rules"]:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "{{ or $labels.run $labels.instance }}" in rule["annotations"]["summary"], (
            "which run"
        )


@pytest.mark.parametrize(
    ("there", "instead", "problem"),
    [
        (
            "changes(jaxpar_steps_total[30m]) == 0",
            "changes(jaxpar_steps_total) == 0",
            "expected type matrix",
        ),
        (
            "changes(jaxpar_steps_total[30m]) == 0",
            "changes(jaxpar_steps_total[30m] == 0",
            "expr of JaxparNoSteps",
        ),
        ("avg_over_time(", "average_over_time(", "unknown function"),
        ("for: 1m", "for: 1 minute", "for of JaxparNoSteps is no duration"),
        ("for: 1m", "unless: 1m", "has no field unless"),
        ("- alert: JaxparNoSteps\n", "- name: JaxparNoSteps\n", "must be an alert or a record"),
        ("{ severity: info }", "{ sev-erity: info }", "sev-erity is no name"),
        ("{ severity: info }", "{ severity: 3 }", "is not text"),
        ("$value | humanize }}", "$value | humanise }}", "is no template"),
        ("$labels.instance }} has done", "$labels.instance has done", "is no template"),
        ("or $labels.run", "of $labels.run", "is no template"),
        (
            "- alert: JaxparNoCheckpoints",
            "- alert: JaxparStepsSlow",
            "rule JaxparStepsSlow is there twice",
        ),
    ],
)
def test_what_prometheus_would_refuse_is_found(there, instead, problem):
    assert TEXT.count(there) >= 1
    assert any(problem in found for found in problems(TEXT.replace(there, instead)))


def test_panels_of_the_dashboard_do_not_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24, "Grafana has 24 columns"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_job_s_metrics_can_be_reached_and_found():
    spec = to_jobset(SERVED)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = spec["spec"]["containers"]
    said = " ".join(container["command"])
    assert said.endswith("--metrics-port 9090 --metrics-address 0.0.0.0"), (
        "an address that Prometheus reaches"
    )
    assert {"name": "metrics", "containerPort": 9090} in container["ports"]
    scrape = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9090",
        "prometheus.io/path": "/metrics",
    }
    assert spec["metadata"]["annotations"] == scrape
    (replicated,) = to_trainjob(SERVED)["spec"]["runtimePatches"][0]["trainingRuntimeSpec"][
        "template"
    ]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["metadata"]["annotations"] == scrape


def test_a_job_s_own_flags_of_metrics_stay():
    command = ("recipes/gpt.py", "--metrics-port", "9090", "--metrics-address=10.0.0.1")
    job = Job(name="gpt", image="a:1", command=command, data=2, tensor=8, metrics_port=9090)
    assert " ".join(job.arguments()).count("--metrics-") == 2
    assert "--metrics" not in " ".join(
        Job(command=("python", "-m", "mine"), data=2, tensor=8, metrics_port=9090).arguments()
    ), "a program of one's own may have no such flag"


def test_an_installed_recipe_gets_the_flags_of_a_script():
    job = Job(
        name="gpt",
        image="a:1",
        command=("jaxpar", "train", "gpt"),
        data=2,
        tensor=8,
        metrics_port=9090,
    )
    said = " ".join(job.arguments())
    assert said.startswith(
        "jaxpar train gpt --mesh.data 2 --mesh.stage 1 --mesh.tensor 8 --metrics-port 9090"
    )


def test_a_podmonitor_selects_the_pod_that_serves_the_metrics():
    monitor = to_podmonitor(SERVED)
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "jobset.sigs.k8s.io/jobset-name": "gpt",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    assert to_podmonitor(JobSettings(name="gpt", metrics_port=9090)) == monitor, (
        "it needs neither a mesh nor a command"
    )
    with pytest.raises(
        ValueError, match=r"needs the port of the metrics; got none. Give the job's"
    ):
        to_podmonitor(Job(command=("recipes/gpt.py",), data=8))


def relabelled(labels, rules):
    """What Prometheus makes of a target's labels by rules that only copy."""
    for rule in rules:
        assert set(rule) == {"sourceLabels", "targetLabel"}, (
            "the other fields have defaults that copy"
        )
        labels = labels | {
            rule["targetLabel"]: ";".join(labels[name] for name in rule["sourceLabels"])
        }
    return labels


def test_series_are_labelled_with_the_run_by_which_the_dashboard_and_the_alerts_name_it():
    spec = to_podmonitor(SERVED)["spec"]
    (endpoint,), (label, *_) = spec["podMetricsEndpoints"], spec["selector"]["matchLabels"]
    found = {
        "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label): "gpt",
        "instance": "10.0.0.1:9090",
    }
    assert relabelled(found, endpoint["relabelings"])["run"] == "gpt", (
        "and not the address, which a restart changes"
    )
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "run")
    assert (
        variable["definition"]
        == variable["query"]["query"]
        == "label_values(jaxpar_steps_total, run)"
    )
    assert variable["allValue"] == ".*", "so that series without the label are shown too"
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert 'run=~"$run"}' in target["expr"]
            assert target["legendFormat"].startswith("{{run}}")


def test_the_page_labels_series_of_annotated_pods_alike():
    for page in ("watching.md", "zh/watching.md"):
        (block,) = re.findall(
            r"```yaml\n(relabel_configs:.*?)```", (FOLDER.parent / page).read_text(), re.DOTALL
        )
        (rule,) = yaml.safe_load(block)["relabel_configs"]
        (endpoint,) = to_podmonitor(SERVED)["spec"]["podMetricsEndpoints"]
        written = {"sourceLabels": rule["source_labels"], "targetLabel": rule["target_label"]}
        assert [written] == endpoint["relabelings"]


def test_a_podmonitor_of_all_pods_or_without_the_label_of_a_run_is_remarked_on():
    monitor = to_podmonitor(SERVED)
    assert not remarks(monitor)
    labels = monitor["spec"]["selector"]["matchLabels"]
    number = labels.pop("batch.kubernetes.io/job-completion-index")
    (said,) = remarks(monitor)
    assert "every other pod is a target that is down. Add batch.kubernetes.io/job-comp" in said
    labels["batch.kubernetes.io/job-completion-index"] = number
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    endpoint["relabelings"][0]["targetLabel"] = "job"
    (said,) = remarks(monitor)
    assert said.startswith("spec.podMetricsEndpoints.0 makes no label run, by which the alerts")
    del endpoint["relabelings"]
    assert remarks(monitor) == [said]


@pytest.mark.parametrize(
    "given", [[], ["recipes/gpt.py"], ["--mesh.data", "2", "--mesh.tensor", "8", "recipes/gpt.py"]]
)
def test_the_command_writes_a_podmonitor_without_a_mesh(given, capsys):
    command = ["--kind", "podmonitor", "--name", "gpt", "--metrics-port", "9090"]
    if given == ["recipes/gpt.py"]:
        command += ["--gpus-per-node", "1"]
    assert main(["manifest", *command, *given]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == to_podmonitor(SERVED)
    assert said.err == ""


def test_a_podmonitor_s_name_is_checked():
    with pytest.raises(ValueError, match="a job's name must be lower-case letters"):
        to_podmonitor(JobSettings(name="My_Job", metrics_port=9090))


@pytest.mark.parametrize("port", [-1, 80, 65536, 6379])
def test_a_port_that_cannot_be_served_is_refused(port):
    with pytest.raises(
        ValueError,
        match=rf"metrics_port must be from 1024 to 65535, .* and not 6379, .*; got {port}. Choose 9090",
    ):
        Job(command=("recipes/gpt.py",), data=8, metrics_port=port)


def test_compiled_programs_have_a_claim_of_their_own_or_none():
    claims = {"checkpoint_claim": "runs", "command": ("recipes/gpt.py",), "image": "a:1", "data": 8}
    told = lambda job: {
        variable["name"]: variable.get("value")
        for variable in to_jobset(job)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
            "spec"
        ]["containers"][0]["env"]
    }
    assert "JAX_COMPILATION_CACHE_DIR" not in told(Job(**claims)), (
        "whoever writes checkpoints could run code"
    )
    job = Job(**claims, cache_claim="programs")
    assert told(job)["JAX_COMPILATION_CACHE_DIR"] == "/compiled"
    pod = to_jobset(job)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "compiled", "persistentVolumeClaim": {"claimName": "programs"}} in pod[
        "volumes"
    ]
    assert {"name": "compiled", "mountPath": "/compiled"} in pod["containers"][0]["volumeMounts"]
    with pytest.raises(
        ValueError,
        match="cache_claim holds programs that the next start runs, and must not be shared",
    ):
        Job(**claims, cache_claim="runs")
