"""Checks manifests, generated or edited by hand, against their API's own schema and against rules that no schema expresses.

The schema is a CustomResourceDefinition, or its ``openAPIV3Schema`` alone, as JSON. Get it from a cluster by
``kubectl get crd jobsets.jobset.x-k8s.io -o json``. Unknown fields are forbidden.
The other rules are about names by which one part refers to another; `agreement.py` has those about what a manifest says twice.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from jaxpar.jobs.agreement import (
    METRICS_PATH,
    check_agreement,
    check_exit_codes,
    check_grace,
    check_num_pods,
    check_probes,
)
from jaxpar.jobs.choices import check_choices
from jaxpar.jobs.field_types import check_types
from jaxpar.jobs.forms import DNS_LABEL
from jaxpar.jobs.job import MAX_NAME
from jaxpar.jobs.job_sets import check_job_set
from jaxpar.jobs.manifests import API_VERSIONS, INDEX
from jaxpar.jobs.placement import check_placement
from jaxpar.jobs.pods import (
    check_bound,
    check_container_ports,
    check_handlers,
    check_names_resolve,
    check_network,
    check_pods,
    check_references,
    labels_of,
)
from jaxpar.jobs.selectors import NUMBER_LABEL, check_protocols, check_together
from jaxpar.jobs.train_jobs import check_train_job
from jaxpar.jobs.workload import NODE, workloads
from jaxpar.runtime.output import needing_extra, printable
from jaxpar.runtime.process_env import NAMES

INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
PORTS_OF_MONITOR = ("port", "portNumber", "targetPort")
LETTER_FIRST = (
    "JobSet",
    "TrainJob",
    "Service",
)  # the kinds whose name begins that of a Service, or is one


def check_manifest(manifest: Any, schema: Any = None) -> None:
    """Raises unless a manifest, generated or edited by hand, is one that its API would accept and that would work.

    It may be of any kind that ``to_jobset``, ``to_trainjob``, ``to_podmonitor`` and ``to_service`` return.

    Args:
        manifest: The manifest, as read from YAML or JSON.
        schema: The schema of its API; needs the package jsonschema (``jaxpar[kubernetes]``). None: only jaxpar's own rules.

    Raises:
        ValueError: The manifest is not valid; the message names the field.
        ImportError: A schema is given, and jsonschema is not installed.
    """
    kind = kind_of(manifest)
    if kind not in API_VERSIONS:
        near = _near_kind(kind)
        raise ValueError(
            f"a manifest must be of a kind that `manifest` writes, {', '.join(API_VERSIONS)}; got kind {kind}. "
            f"{f'Did you mean {near}?' if near else 'Check a file that has one of these.'}"
        )
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"a schema must be a JSON object; got a {type(schema).__name__}. Take it from the cluster."
            )
        _check_schema(manifest, schema)
    with _fields_as_in_the_api(kind):
        check_rules(manifest)


def kind_of(manifest: Any) -> str:
    """Returns the kind of a manifest, or the type of what is none."""
    kind = manifest.get("kind") if isinstance(manifest, Mapping) else type(manifest).__name__
    return printable(str(kind))[:80]


def _near_kind(kind: str) -> str | None:
    named = {each.lower(): each for each in API_VERSIONS}
    near = get_close_matches(kind.lower(), named, 1, cutoff=0.8)
    return named[near[0]] if near else None


def _is_of_others(manifest: Any) -> bool:
    """Returns whether a manifest is of a kind that is not checked, such as a ConfigMap."""
    kind = manifest.get("kind") if isinstance(manifest, Mapping) else None
    return isinstance(kind, str) and kind not in API_VERSIONS and _near_kind(kind) is None


@contextmanager
def _fields_as_in_the_api(kind: str) -> Iterator[None]:
    try:
        yield
    except (IndexError, KeyError) as error:
        got = f"one without {error}" if isinstance(error, KeyError) else "one with an empty list"
        raise ValueError(
            f"a {kind} must have all parts that its pods need; got {got}. Write it as `manifest` does."
        ) from error
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"a {kind} must have its fields as its API has them; got a {type(error).__name__} at {error}. Check it against the "
            "schema too, by --schema, which names the field."
        ) from error


def in_lists(documents: Sequence[Any]) -> list[Any]:
    """Returns the documents of a YAML file with the items of a List, as ``kubectl get -o yaml`` writes it, in its place."""
    found = []
    for each in documents:
        is_list = isinstance(each, Mapping) and each.get("kind") == "List"
        items = each.get("items") if is_list else None
        found += items if isinstance(items, list) else [each]
    return found


def check_manifests(manifests: Sequence[Any], schema: Any = None) -> list[Mapping[str, Any]]:
    """Returns the manifests of a file of the kinds that are checked; raises unless ``check_manifest`` takes each.

    So it does unless they fit one another, and if all are of other kinds. Those of other kinds beside them, such as a
    ConfigMap, are passed over.

    Args:
        manifests: The manifests, as read from the documents of a YAML file.
        schema: The schema of their API, as ``check_manifest`` takes it.

    Raises:
        ValueError: A manifest is not valid, there is none, or they are of several kinds and a schema is given.
        ImportError: A schema is given, and jsonschema is not installed.
    """
    if not manifests:
        raise ValueError("a manifest must hold a document; got none. Write one with `manifest`.")
    are_checked = [not _is_of_others(each) for each in manifests]
    if not any(are_checked):
        are_checked[0] = True  # whose error names the kinds
    checked = [each for each, is_checked in zip(manifests, are_checked, strict=True) if is_checked]
    kinds = sorted({kind_of(each) for each in checked})
    if schema is not None and len(kinds) > 1:
        raise ValueError(
            f"a schema is that of one kind; got a file of {', '.join(kinds)}. Check them in files of their own."
        )
    for number, manifest in enumerate(manifests, 1):
        if not are_checked[number - 1]:
            continue
        try:
            check_manifest(manifest, schema)
        except ValueError as error:
            if len(manifests) == 1:
                raise
            raise ValueError(f"document {number}: {error}") from error
    with _fields_as_in_the_api("Service"):
        check_together(checked)
    return checked


def _check_schema(manifest: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    with needing_extra("checking against a schema needs the package jsonschema", "kubernetes"):
        import jsonschema
    schema = _schema_of_kind(schema, manifest)
    errors = jsonschema.Draft202012Validator(strict(schema)).iter_errors(manifest)
    found = [
        f"{'.'.join(map(str, error.absolute_path)) or 'the top'}: {error.message}"
        for error in errors
    ]
    if found:
        raise ValueError(
            f"a manifest must fit its API's schema; got {'; '.join(found)}. Correct these fields."
        )


def _schema_of_kind(given: Mapping[str, Any], manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a manifest's kind: what is given, or the one of a CustomResourceDefinition.

    Raises:
        ValueError: It is of another kind or version, or describes no fields, so that it would allow everything.
    """
    kind, version = kind_of(manifest), str(manifest.get("apiVersion")).rpartition("/")[2]
    if given.get("kind") == "CustomResourceDefinition":
        try:
            of, versions = given["spec"]["names"]["kind"], given["spec"]["versions"]
            schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in versions}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "a CustomResourceDefinition must have spec.names.kind and a schema for each of spec.versions; got one without "
                f"{error}. Take it from the cluster."
            ) from error
        if of != kind or version not in schemas:
            names = ", ".join(printable(str(each)) for each in schemas)
            raise ValueError(
                f"a schema must be that of the manifest, {kind} {version}; got {printable(str(of))} {names}. Give its own."
            )
        return schemas[version]
    properties = given.get("properties")
    if not isinstance(properties, Mapping) or "spec" not in properties:
        raise ValueError(
            "a schema must describe the fields of a kind, with its spec; got one of "
            f"{printable(', '.join(map(str, given)))[:80] or 'nothing'}, which allows everything. Give a "
            "CustomResourceDefinition, such as kubectl get crd jobsets.jobset.x-k8s.io -o json writes, or its openAPIV3Schema."
        )
    return given


def strict(schema: Any) -> Any:
    """Returns a Kubernetes schema as JSON Schema that forbids fields it does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:  # jsonschema would fetch it
        raise ValueError(
            f"a schema of Kubernetes has no $ref; got one to {schema['$ref']!r}. Take it from the cluster."
        )
    if schema.get("x-kubernetes-int-or-string"):
        return INT_OR_STRING
    closed = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get(
            "x-kubernetes-preserve-unknown-fields"
        ):
            closed["additionalProperties"] = False
    return closed


def check_rules(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless a manifest of one of these kinds fulfils the rules of its kind."""
    kind = manifest["kind"]
    if manifest.get("apiVersion") != API_VERSIONS[kind]:
        raise ValueError(
            f"apiVersion of a {kind} must be {API_VERSIONS[kind]}; got {str(manifest.get('apiVersion'))[:80]!r}. Correct it."
        )
    check_types(manifest)
    check_choices(manifest)
    name = manifest.get("metadata", {}).get("name", "")
    if not DNS_LABEL.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"metadata.name must be a host name's label of at most {MAX_NAME} letters; got {name!r}. Rename it."
        )
    if kind in LETTER_FIRST and not name[0].isalpha():
        raise ValueError(
            f"metadata.name of a {kind} must begin with a letter; got {name!r}. Rename it."
        )
    checks = {
        "JobSet": _check_jobset,
        "TrainJob": _check_trainjob,
        "PodMonitor": _check_podmonitor,
        "Deployment": _check_deployment,
        "Service": _check_service,
    }
    checks[kind](manifest)
    for pods in workloads(manifest):
        check_num_pods(pods)
        check_pods(pods)
        check_agreement(pods)
        check_placement(pods)
        if kind == "Deployment":
            check_grace(pods)


def _check_deployment(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    labels, wanted = labels_of(spec["template"]), spec["selector"]["matchLabels"]
    if not wanted or not wanted.items() <= labels.items():
        raise ValueError(
            f"spec.selector.matchLabels of a Deployment must be labels of its pods, {dict(labels)}; got {wanted}. Make them "
            "equal."
        )
    pod = spec["template"]["spec"]
    if (policy := pod.get("restartPolicy", "Always")) != "Always":
        raise ValueError(
            f"restartPolicy of a Deployment's pods must be Always; got {policy}. Leave it out."
        )
    strategy = spec.get("strategy") or {}
    if strategy.get("type") == "Recreate" and strategy.get("rollingUpdate") is not None:
        raise ValueError(
            "spec.strategy.rollingUpdate of a Deployment must not be beside type: Recreate; got "
            f"{strategy['rollingUpdate']}. Leave one of the two out."
        )
    _check_containers(pod, "spec.template.spec")
    check_probes(pod["containers"], is_served=any(pods.served for pods in workloads(manifest)))


def _check_containers(pod: Mapping[str, Any], path: str) -> None:
    for each in (*pod["containers"], *pod.get("initContainers", [])):
        if "image" not in each:
            raise ValueError(
                f"the container {each['name']} of {path} must name an image; got none. Give one that has its program."
            )
    check_references([*pod["containers"], *pod.get("initContainers", [])], path)
    check_container_ports(pod["containers"], path)
    check_handlers([*pod["containers"], *pod.get("initContainers", [])], path)


def _check_trainjob(manifest: Mapping[str, Any]) -> None:
    check_train_job(manifest)
    count = manifest["spec"]["trainer"].get("numNodes")
    _check_name_of_pod(manifest["metadata"]["name"], NODE, count)


def _check_service(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    if not spec["selector"] or not spec["ports"]:
        raise ValueError(
            "a Service must have a selector and ports; got none. Write it with `manifest --kind service`."
        )
    check_protocols(spec["ports"])


def _check_podmonitor(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    if (
        not spec["selector"].keys() & {"matchLabels", "matchExpressions"}
        or not spec["podMetricsEndpoints"]
    ):
        raise ValueError(
            "a PodMonitor must have labels to select and an endpoint; got none. Write it with `manifest --kind podmonitor`."
        )
    number = spec["selector"].get("matchLabels", {}).get(NUMBER_LABEL, "0")
    if number != "0":
        raise ValueError(
            f"a PodMonitor must select process 0, which alone serves metrics; got {NUMBER_LABEL} {printable(number)!r}. Write "
            '"0".'
        )
    for endpoint in spec["podMetricsEndpoints"]:
        _check_endpoint(endpoint)


def _check_endpoint(endpoint: Mapping[str, Any]) -> None:
    path, port = endpoint.get("path", METRICS_PATH), endpoint.get("port")
    if path != METRICS_PATH:
        raise ValueError(
            f"the path of a PodMonitor must be {METRICS_PATH}, where a run has its metrics; got {path!r}. Correct it."
        )
    if not endpoint.keys() & {*PORTS_OF_MONITOR}:
        raise ValueError(
            f"an endpoint of a PodMonitor must have one of {', '.join(PORTS_OF_MONITOR)}; got none. Write port: metrics."
        )
    if str(port).isdigit():
        raise ValueError(
            f"the port of a PodMonitor must be the name of one; got {port!r}. Write the name, metrics, or portNumber: {port}."
        )


def _check_jobset(manifest: Mapping[str, Any]) -> None:
    if not manifest["spec"]["replicatedJobs"]:
        raise ValueError(
            "spec.replicatedJobs of a JobSet must have a job; got none. Write it with `manifest`."
        )
    check_exit_codes(manifest)
    check_job_set(manifest)
    name = manifest["metadata"]["name"]
    network = manifest["spec"].get("network", {})
    check_network(network)
    subdomain = network.get("subdomain", name)
    for number, job in enumerate(manifest["spec"]["replicatedJobs"]):
        path, spec = f"spec.replicatedJobs.{number}", job["template"]["spec"]
        if job.get("replicas", 1) != 1:
            raise ValueError(
                f"{path}.replicas must be 1, since processes are numbered inside a Job; got {job['replicas']}. Raise its "
                "parallelism and completions."
            )
        _check_policy(spec, path)
        _check_restarts(spec, path)
        _check_pods_of_job(spec, name, subdomain, job["name"], path)
        count = spec.get("parallelism")
        if count != spec.get("completions"):
            raise ValueError(
                f"{path}.parallelism must equal completions, the number of processes; got {count} and "
                f"{spec.get('completions')}. Make them equal."
            )
        _check_containers(spec["template"]["spec"], path)
        _check_place_is_told(spec["template"]["spec"]["containers"], count, path)
        for container in spec["template"]["spec"]["containers"]:
            told = {variable["name"]: variable for variable in container.get("env", [])}
            _check_environment(told, count, f"{name}-{job['name']}-0-0.{subdomain}", path)
            _check_namespace(told, manifest["metadata"].get("namespace"))
            check_bound(spec["template"]["spec"], container, path)
            check_names_resolve(spec["template"]["spec"], container, count=count, path=path)


def _check_pods_of_job(
    spec: Mapping[str, Any], name: str, subdomain: str, job: str, path: str
) -> None:
    """Raises ValueError unless the pods of a Job are numbered, and are found by names that are short enough."""
    if spec.get("completionMode") != "Indexed":
        raise ValueError(
            f"{path}.completionMode must be Indexed, by which pods are numbered; got {spec.get('completionMode')}. Correct it."
        )
    own = spec["template"]["spec"].get("subdomain", subdomain)
    if own != subdomain:
        raise ValueError(
            f"subdomain of {path} must be that of spec.network; got {own!r} and {subdomain!r}. Make them equal."
        )
    _check_name_of_pod(name, job, spec.get("completions"))


def _check_name_of_pod(name: str, job: str, count: int | None) -> None:
    """Raises ValueError if the name of the last pod is too long, as JobSet's webhook counts."""
    longest = f"{name}-{job}-0-{(count or 1) - 1}-abcde"
    if len(longest) > MAX_NAME:
        raise ValueError(
            f"a pod's name must have at most {MAX_NAME} letters; got {longest!r}. Shorten metadata.name by "
            f"{len(longest) - MAX_NAME}."
        )


def _check_policy(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a rule about exit codes is of a container that the pods do not have."""
    pod = spec["template"]["spec"]
    names = [each["name"] for each in (*pod["containers"], *pod.get("initContainers", []))]
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        wanted = rule.get("onExitCodes", {}).get("containerName", names[0])
        if wanted not in names:
            raise ValueError(
                f"containerName in {path}.podFailurePolicy must be a container of the pods, {', '.join(names)}; got "
                f"{wanted!r}. Make them equal."
            )


def _check_place_is_told(
    containers: Sequence[Mapping[str, Any]], count: int | None, path: str
) -> None:
    """Raises ValueError if no container of several pods is told which process it is: each would train alone."""
    told = {variable["name"] for each in containers for variable in each.get("env", [])}
    missing = [name for name in NAMES if name not in told]
    if (count or 1) > 1 and missing and not any("envFrom" in each for each in containers):
        raise ValueError(
            f"the {count} pods of {path} must be told which process each is; got no {', '.join(missing)}. Write them with "
            "`manifest`."
        )


def _check_restarts(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a pod may be restarted alone: its peers have lost their program with it, and would wait."""
    restarts, alone = (
        spec["template"]["spec"].get("restartPolicy"),
        spec.get("backoffLimit", 6),
    )  # the API's default
    if restarts != "Never" or alone != 0:
        raise ValueError(
            f"pods of {path} are restarted together, not alone; got restartPolicy {restarts} and backoffLimit {alone}. Write "
            "Never and 0."
        )


def _check_namespace(told: Mapping[str, Any], namespace: str | None) -> None:
    """Raises ValueError if the whole name of pod 0's host has another namespace than the pods."""
    address = told.get("JAX_COORDINATOR_ADDRESS", {}).get("value", "")
    given = [*address.partition(":")[0].split(".")[2:], ""][0]  # of POD.SUBDOMAIN.NAMESPACE.svc
    if namespace and given and given != namespace:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS must be in the namespace of the pods, {namespace}; got {address}. Leave all after "
            "the second name out, or correct it."
        )


def _check_environment(told: Mapping[str, Any], count: int, host: str, path: str) -> None:
    processes = told.get("JAX_NUM_PROCESSES", {}).get("value")
    if processes is not None and processes != str(count):
        raise ValueError(
            f"JAX_NUM_PROCESSES must be the number of pods; got {processes}, {path}.parallelism {count}. Make them equal."
        )
    address = told.get("JAX_COORDINATOR_ADDRESS", {}).get("value", host)
    if not re.fullmatch(rf"{re.escape(host)}(\..*)?", address.partition(":")[0]):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS must be pod 0's host, {host}; got {address}. Correct it."
        )
    given = told.get("JAX_PROCESS_ID", {})
    if count > 1 and "value" in given:
        raise ValueError(
            f"JAX_PROCESS_ID must be the pod's number, {INDEX}; got the value {given['value']} for all {count} pods of {path}. "
            "Write it as valueFrom a fieldRef."
        )
    number = given.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", INDEX)
    if number != INDEX:
        raise ValueError(
            f"JAX_PROCESS_ID must be the pod's number, {INDEX}; got {number}. Correct it."
        )
