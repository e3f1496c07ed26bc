"""The types and the forms of a manifest's fields: the table is that of the APIs' schemas, and each type has its message."""

import json
import re
from pathlib import Path

import pytest

from jaxpar.commands.manifest import read_yaml
from jaxpar.jobs import Job, check_manifest, remarks
from jaxpar.jobs.field_types import REQUIRED, TYPES, check_types, required_of, type_of
from tests.support.written_manifests import documents, edit

SCHEMAS = sorted((Path(__file__).parent / "data" / "schemas").glob("*.json"))
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
DIGEST = "0f" * 32
FROM_PLACE_TO_PLACE = {
    "status",
    "values",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "image",
    "port",
    "options",
}


def fields_of(schema, around=""):
    """Yields the fields of a schema: the name, the one around it, and the type; `status` is the cluster's own."""
    for name, field in schema.get("properties", {}).items():
        if (around, name) != ("", "status"):
            yield name, around, kind_of(field)
            for inner in (field, field.get("items", {}), field.get("additionalProperties", {})):
                yield from fields_of(inner, name) if isinstance(inner, dict) else ()


def kind_of(field):
    items, others = field.get("items"), field.get("additionalProperties")
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if items is not None:
        return "array" if kind_of(items) == "object" else f"array of {kind_of(items)}"
    return f"object of {kind_of(others)}" if isinstance(others, dict) else field["type"]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_each_field_has_the_type_of_its_schema(path):
    seen = {*fields_of(json.loads(path.read_text()))}
    assert len(seen) > 300
    unknown = {name for name, around, _ in seen if type_of(name, around) is None}
    assert unknown <= FROM_PLACE_TO_PLACE
    wrong = [each for each in seen if type_of(each[0], each[1]) not in (None, each[2])]
    wrong = [
        each
        for each in wrong
        if (each[0], type_of(*each[:2]), each[2]) != ("port", "port", "quantity")
    ]
    assert not wrong


def objects_of(schema, name, around=""):
    """Yields the objects of a schema: the name of their field, the one around it, and what they must have."""
    if schema.get("properties"):
        yield name, around, frozenset(schema.get("required", []))
    for inner, field in schema.get("properties", {}).items():
        for each in (field, field.get("items", {})):
            yield from objects_of(each, inner, name)


def test_each_object_must_have_what_its_schema_requires():
    seen = {
        each
        for path in SCHEMAS
        for each in objects_of(json.loads(path.read_text()), path.stem.split(".")[0])
    }
    of_services = {"spec.ports", "TrainJob.spec"}
    assert {*REQUIRED} - {
        key for name, around, _ in seen for key in (name, f"{around}.{name}")
    } == of_services
    wrong = [
        each
        for each in seen
        if not {*required_of(each[0], each[1])} <= each[2] and each[1] != "template"
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("jobset", "main env JAX_NUM_PROCESSES value", None, "env.1 must have a value or valueFrom; got none. Write it."),
        ("jobset", "main env POD_IP valueFrom fieldRef", None, "env.3.valueFrom must have a source, such as fieldRef; got n"),
        ("jobset", "main env POD_IP valueFrom fieldRef fieldPath", None, "valueFrom.fieldRef must have fieldPath; got none."),
        ("jobset", "pod volumes checkpoints persistentVolumeClaim", None,
         "volumes.1 must have a source, such as persistentVolumeClaim or emptyDir; got none. Write it."),
        ("jobset", "main ports 0 containerPort", None, "containers.0.ports.0 must have containerPort; got none. Write it."),
        ("jobset", "spec failurePolicy rules 0 action", None, "spec.failurePolicy.rules.0 must have action; got none. Write"),
        ("jobset", "job podFailurePolicy rules 0 onExitCodes values", None, "onExitCodes must have values; got none. Write"),
        ("service", "main volumeMounts checkpoints mountPath", None, "volumeMounts.0 must have mountPath; got none. Write i"),
        ("trainjob", "spec runtimeRef", None, "spec must have runtimeRef; got none. Write it."),
        ("jobset", "pod containers", None, "a JobSet must have all parts that its pods need; got one without 'containers'."),
        ("jobset", "pod containers 0", None, "a JobSet must have all parts that its pods need; got one with an empty list."),
        ("service", "spec selector matchLabels", {"app": 1}, "matchLabels.app must be a string; got 1, without quotes in YA"),
        ("service", "main livenessProbe httpGet port", [80], "httpGet.port must be the number or the name of a port; got a"),
        ("jobset", "main resources requests cpu", -1, "requests.cpu must be a quantity, such as 8 or 800Gi; got -1. Correct"),
        ("jobset", "main command 0", "", "the command of spec.replicatedJobs.0 must begin with a program; got an empty word."),
        ("trainjob", "main env JAXPAR_INITIALIZATION_TIMEOUT value", "5m", "must be a number of seconds above 0; got '5m'. G"),
        ("service", "main livenessProbe periodSeconds", 2**31, "livenessProbe.periodSeconds must be at most 2147483647; got"),
        ("jobset", "spec failurePolicy maxRestarts", 10**10, "spec.failurePolicy.maxRestarts must be at most 2147483647; go"),
        ("jobset", "main resources requests cpu", 1.5, "requests.cpu must be a whole number or a text; got 1.5. Put it into"),
        ("trainjob", "pod volumes shm emptyDir sizeLimit", 1e9, "emptyDir.sizeLimit must be a whole number or a text; got 10"),
        ("jobset", "main resources requests", {1: 2}, "the names of fields of spec.replicatedJobs.0.template.spec.template."),
        ("jobset", "spec suspend", {2: 1}, "spec.suspend must be true or false; got an object. Write true or false, without"),
        ("monitor", "spec podMetricsEndpoints 0 port", None, "an endpoint of a PodMonitor must have one of port, portNumber"),
        ("jobset", "pod terminationGracePeriodSeconds", "150",
         "template.spec.terminationGracePeriodSeconds must be a whole number; got '150'. Write it in digits, without quotes"),
        ("jobset", "pod terminationGracePeriodSeconds", -1, "terminationGracePeriodSeconds must be at least 0; got -1. Corr"),
        ("jobset", "job parallelism", 2.5, "parallelism must be a whole number; got 2.5. Write it in digits, without quotes"),
        ("jobset", "job backoffLimit", True, "backoffLimit must be a whole number; got True. Write it in digits, without qu"),
        ("jobset", "main ports 0 containerPort", "6379", "ports.0.containerPort must be a whole number; got '6379'. Write"),
        ("jobset", "job podFailurePolicy rules 0 onExitCodes values", ["2"], "values.0 must be a whole number; got '2'."),
        ("service", "spec replicas", "2", "spec.replicas must be a whole number; got '2'. Write it in digits, without"),
        ("service", "main readinessProbe periodSeconds", "10", "readinessProbe.periodSeconds must be a whole number; got '1"),
        ("jobset", "pod shareProcessNamespace", "false", "must be true or false; got 'false'. Write true or false, without"),
        ("jobset", "spec suspend", "true", "spec.suspend must be true or false; got 'true'. Write true or false, without qu"),
        ("jobset", "spec network enableDNSHostnames", 1, "must be true or false; got 1. Write true or false, without quotes"),
        ("jobset", "job podFailurePolicy rules 2 onPodConditions 0 status", True,
         "onPodConditions.0.status must be a string; got True, without quotes in YAML. Put it into quotes."),
        ("jobset", "main env JAX_NUM_PROCESSES value", 2, "must be a string; got 2, without quotes in YAML. Put it into quo"),
        ("jobset", "notes prometheus.io/port", 9090, "annotations.prometheus.io/port must be a string; got 9090, without qu"),
        ("jobset", "main command 3", 9, "must be a string; got 9, without quotes in YAML. Put it into quotes."),
        ("jobset", "main resources requests cpu", "lots", "requests.cpu must be a quantity, such as 8 or 800Gi; got 'lots'."),
        ("jobset", "pod volumes shm emptyDir sizeLimit", "64GiB", "sizeLimit must be a quantity, such as 8 or 800Gi; got '6"),
        ("jobset", "main env", {"A": "b"}, "containers.0.env must be a list; got an object. Write each item in a line with"),
        ("jobset", "pod containers", ["train"], "spec.containers.0 must be an object; got 'train'. Write its fields, each"),
        ("jobset", "spec", "hello", "spec must be an object; got 'hello'. Write its fields, each with its name."),
        ("trainjob", "main numNodes", "2", "spec.trainer.numNodes must be a whole number; got '2'. Write it in digits"),
        ("monitor", "spec podMetricsEndpoints 0 honorLabels", "yes", "honorLabels must be true or false; got 'yes'. Write"),
        ("jobset", "metadata namespace", "X_Y", "metadata.namespace must be lower-case letters, digits and -, at most 63 lo"),
        ("jobset", "metadata labels kueue.x-k8s.io/queue-name", "re search",
         "queue-name must be lower-case letters, digits, - and ., at most 63 long; got 're search'. Correct it."),
        ("jobset", "metadata labels", {"my team": "a"}, "the name of a field of metadata.labels must be letters, digits, -,"),
        ("service", "main livenessProbe httpGet scheme", "https", "scheme must be HTTP, HTTPS; got 'https'. Did you mean HTT"),
        ("service", "metadata labels", {"team": "a b"}, "metadata.labels.team must be letters, digits, -, _ and ., the firs"),
        ("jobset", "main image", "registry/a b", "image must be a container image, as in registry/name:tag or registry/name"),
        ("jobset", "main name", "Train", "containers.0.name must be lower-case letters, digits and -, at most 63 long; got"),
        ("jobset", "spec failurePolicy rules 1 name", "taken-away",
         "failurePolicy.rules.1.name must be letters, digits, _, : and a comma, a letter first, at most 128 long; got "),
        ("jobset", "spec failurePolicy rules 1 name", "fi nal", "rules.1.name must be letters, digits, _, : and a comma, a"),
        ("jobset", "spec failurePolicy rules 1 name", "final", "failurePolicy must have different names; got 'final' twice"),
        ("jobset", "spec failurePolicy rules 1 onJobFailureReasons", ["PodFailure"],
         "PodFailurePolicy; got 'PodFailure'. Did you mean PodFailurePolicy?"),
        ("jobset", "main ports metrics name", "metrics-of-the-run", "one is a letter, at most 15 long; got 'metrics-of-the"),
        ("jobset", "main env JAXPAR_RESUME name", "2B", "env.6.name must be letters, digits, _, - and ., no digit first"),
        ("jobset", "main ports 0 containerPort", 0, "ports.0.containerPort must be from 1 to 65535; got 0. Correct it."),
        ("service", "main livenessProbe httpGet port", 0, "httpGet.port must be the number or the name of a port; got 0. Wr"),
        ("monitor", "spec podMetricsEndpoints 0 port", "", "podMetricsEndpoints.0.port must be the number or the name of a"),
        ("jobset", "job podFailurePolicy rules 2 onPodConditions 0 status", "", "status must be True, False, Unknown; got"),
        ("trainjob", "spec runtimeRef name", "", "spec.runtimeRef.name must be lower-case letters, digits, - and ., at most"),
        ("trainjob", "spec runtimeRef kind", "", "spec.runtimeRef.kind must be ClusterTrainingRuntime, TrainingRuntime; got"),
        ("trainjob", "spec runtimeRef kind", "xClusterTrainingRuntime", "got 'xClusterTrainingRuntime'. Did you mean Cluste"),
        ("trainjob", "spec runtimeRef apiGroup", "", "spec.runtimeRef.apiGroup must be trainer.kubeflow.org; got ''. Write"),
        ("jobset", "pod volumes checkpoints persistentVolumeClaim claimName", "My_runs", "claimName must be lower-case lett"),
        *((kind, place, {"allowPrivilegeEscalation": False, **rights},
           f"securityContext may not have allowPrivilegeEscalation: false beside {told}, which allows it; got both. Leave")
          for kind, place in (("jobset", "main securityContext"), ("trainjob", "pod containers node securityContext"))
          for rights, told in (({"privileged": True}, "privileged: true"),
                               ({"capabilities": {"add": ["CAP_SYS_ADMIN"]}}, "CAP_SYS_ADMIN in capabilities.add"))),
        *(("jobset", f"main volumeMounts checkpoints {field}", path, f"{field} must be a path below the volume, without / in")
          for field in ("subPath", "subPathExpr") for path in ("/gpt", "../gpt", "a/..", "a/../b")),
        ("jobset", "main volumeMounts checkpoints", {"name": "a", "mountPath": "/a", "subPath": "b", "subPathExpr": "c"},
         "volumeMounts.1 may have subPath or subPathExpr; got both. Leave one of them out."),
        ("jobset", "pod initContainers", [{"name": "train", "image": "a:1"}],
         "must have different names; got 'train' twice. Rename one."),
        ("service", "pod containers +", {"name": "serve", "image": "a:1"}, "must have different names; got 'serve' twice. Re"),
        *(("jobset", "pod topologySpreadConstraints", [{name: value for name, value in SPREAD.items() if name != left_out}],
           f"topologySpreadConstraints.0 must have {left_out}; got none. Write it.") for left_out in SPREAD),
        *((kind, "main resources" if kind == "service" else f"main resources{'PerNode' * (kind == 'trainjob')}",
           {of: {"rdma/ib": "0.5"}}, f"{of}.rdma/ib must be a whole number, since a device is not divided; got '0.5'. Write")
          for kind in ("jobset", "trainjob", "service") for of in ("requests", "limits")),
        ("jobset", "main resources requests cpu", "96Gi", "requests.cpu must be a number of cores, at most 10000; got '96Gi'"),
        ("jobset", "main resources limits memory", "800", "limits.memory must be at least 1Mi, since no container starts wit"),
        ("jobset", "pod dnsPolicy", "None", "spec.template.spec with dnsPolicy None must have nameservers in dnsConfig; got"),
        ("jobset", "spec replicatedJobs 0 dependsOn", [{"name": "a"}], "dependsOn.0 must have status; got none. Write it."),
        ("jobset", "spec coordinator", {"podIndex": 0}, "spec.coordinator must have replicatedJob; got none. Write it."),
        ("jobset", "spec successPolicy", {"operator": "Some"}, "spec.successPolicy.operator must be All, Any; got 'Some'."),
    ],
)  # fmt: skip
def test_a_value_that_its_api_refuses_is_named(kind, place, value, message):
    manifest = next(iter(documents(kind)))
    edit(manifest, kind, place, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_manifest(manifest)


@pytest.mark.parametrize(
    "image",
    [
        "a", "a:1", "registry.example/jaxpar:1", "Registry:5000/a/b__c/d-e.f:v1.0_x", "localhost:5000/a", "a--b", "x/a:A",
        f"a:1@sha256:{DIGEST}", f"registry.example/a@sha256:{DIGEST}", f"a:{'b' * 128}",
    ],
)  # fmt: skip
def test_an_image_that_a_runtime_can_pull_is_taken(image):
    (job,) = documents("jobset")
    edit(job, "jobset", "main image", image)
    check_manifest(job)
    assert Job(command=("mine",), data=8, image=image).image == image


@pytest.mark.parametrize(
    "image",
    [
        "registry.example/Jaxpar:1", "Jaxpar:1", "r//j:1", "r/j:", "r/j@sha256:abc", "r/j@", f"r/j@{DIGEST}", "a:1:2", "/a",
        f"a@sha256:{DIGEST.upper()}", "a/", "a:-1", f"a:{'b' * 129}", "a_", "a..b", "-r/a", "r:x/a", "a___b",
    ],
)  # fmt: skip
def test_an_image_that_no_runtime_can_pull_is_refused(image):
    (job,) = documents("jobset")
    edit(job, "jobset", "main image", image)
    with pytest.raises(
        ValueError, match="image must be a container image, as in registry/name:tag"
    ):
        check_manifest(job)
    with pytest.raises(
        ValueError, match="image must be a container image, as in registry/name:tag"
    ):
        Job(command=("mine",), data=8, image=image)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("type", "Loadbalancer", "spec.type must be ClusterIP, NodePort, LoadBalancer; got 'Loadbalancer'. Did you mean"),
        ("type", "ExternalName", "spec.type must be ClusterIP, NodePort, LoadBalancer; got 'ExternalName'."),
        ("sessionAffinity", "ClientIp", "spec.sessionAffinity must be ClientIP, None; got 'ClientIp'. Did you mean Clien"),
    ],
)  # fmt: skip
def test_a_choice_of_a_service_is_one_of_its_api(name, value, message):
    _, service = documents("service")
    service["spec"][name] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        check_manifest(service)


def test_the_port_of_a_service_is_one():
    _, service = documents("service")
    service["spec"]["ports"][0]["port"] = 0
    with pytest.raises(
        ValueError, match=r"spec\.ports\.0\.port must be from 1 to 65535; got 0\. Correct it\."
    ):
        check_manifest(service)


def test_a_quantity_of_a_deployment_may_have_a_point():
    found = [*documents("service")]
    edit(found[0], "service", "main resources requests cpu", 1.5)
    check_manifest(found[0])


def test_fields_of_users_may_have_the_names_of_the_api():
    check_types(
        {
            "kind": "Service",
            "metadata": {"labels": {"env": "a"}},
            "spec": {"selector": {"replicas": "b"}},
        }
    )
    assert {"env", "replicas"} <= {*TYPES}


def test_a_field_without_a_value_is_one_that_is_not_there():
    text = "kind: JobSet\nmetadata: {creationTimestamp: null, name: a}\nspec:\n  suspend:\n  replicatedJobs: [null]\n"
    (found,) = read_yaml(text, "--check")
    assert found == {
        "kind": "JobSet",
        "metadata": {"name": "a"},
        "spec": {"replicatedJobs": [None]},
    }
    with pytest.raises(
        ValueError, match=r"spec\.replicatedJobs\.0 must be an object; got null\. Write its fields"
    ):
        check_types(found)


def test_what_kubernetes_keeps_of_its_own_is_not_checked():
    (job,) = documents("jobset")
    check_manifest(job | {"status": {"restarts": "many", "conditions": "none"}})
    assert not remarks(job)


OF_CLUSTERS = {  # what people add to the pods of a job
    "nodeSelector": {"example.com/gpu": "h100"},
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "high",
    "tolerations": [
        {
            "key": "nvidia.com/gpu",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": -1,
        }
    ],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "initContainers": [
        {
            "name": "logs",
            "image": "b:1",
            "restartPolicy": "Always",
            "command": ["sh", "-c", "echo $HOME"],
        },
        {
            "name": "wait",
            "image": "b:1",
            "livenessProbe": {"tcpSocket": {"port": "http"}},
            "volumeMounts": [],
        },
    ],
}
VOLUMES = {
    "settings": {
        "configMap": {"name": "a", "defaultMode": 420, "items": [{"key": "a", "path": "b"}]}
    },
    "secret": {"secret": {"secretName": "a", "optional": True}},
    "disk": {"hostPath": {"path": "/mnt", "type": "Directory"}},
    "token": {
        "projected": {
            "sources": [{"serviceAccountToken": {"path": "a", "expirationSeconds": 3600}}]
        }
    },
    "bucket": {
        "csi": {
            "driver": "a",
            "volumeAttributes": {"replicas": "b", "mountOptions": "implicit-dirs"},
        }
    },
    "scratch": {"emptyDir": {}},
}
VARIABLES = [
    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b", "optional": True}}},
    {
        "name": "MEMORY",
        "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Gi"}},
    },
    {"name": "EMPTY", "value": ""},
    {"name": "PLACE", "value": "$(POD_IP)/$$HOME"},
]


def test_what_clusters_need_beside_it_is_taken():
    (job,) = documents("jobset")
    job["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": '{"replicas": "any"}\n'
    }
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod |= OF_CLUSTERS
    pod["volumes"] += [{"name": name, **source} for name, source in VOLUMES.items()]
    (main,) = pod["containers"]
    main["volumeMounts"] += [
        {"name": name, "mountPath": f"/{name}", "readOnly": True} for name in VOLUMES
    ]
    main["env"] += VARIABLES
    for of in main["resources"].values():
        of |= {"ephemeral-storage": "1.5e10", "hugepages-2Mi": "1Gi"}
    main["resources"]["requests"]["cpu"] = "8500m"
    check_manifest(job, json.loads((SCHEMAS[0]).read_text()))
    assert not remarks(job)
