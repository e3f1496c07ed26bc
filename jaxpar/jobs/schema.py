"""Checks a manifest against its API's own schema, with unknown fields forbidden, and against rules that no schema expresses.

The schema is the ``openAPIV3Schema`` of a CustomResourceDefinition, as JSON. Get it from a cluster by
``kubectl get crd jobsets.jobset.x-k8s.io -o json``: it is in ``spec.versions[].schema``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.jobs.job import DNS_LABEL, MAX_NAME
from jaxpar.jobs.jobset import INDEX

INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def check_manifest(manifest: Any, schema: Any = None) -> None:
    """Raises unless a JobSet or TrainJob, generated or edited by hand, is one that its API would accept and that would work.

    Args:
        manifest: The manifest, as read from YAML or JSON.
        schema: The schema of its API; needs the package jsonschema (``jaxpar[kubernetes]``). None: only jaxpar's own rules.

    Raises:
        ValueError: The manifest is not valid; the message names the field.
        ImportError: A schema is given, and jsonschema is not installed.
    """
    if not isinstance(manifest, Mapping) or manifest.get("kind") not in ("JobSet", "TrainJob"):
        kind = manifest.get("kind") if isinstance(manifest, Mapping) else type(manifest).__name__
        raise ValueError(f"a manifest must be a JobSet or a TrainJob; got kind {kind}. Write one with `manifest`.")
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"a schema must be a JSON object; got a {type(schema).__name__}. Take it from the cluster."
            )
        _check_schema(manifest, schema)
    try:
        _check_own_rules(manifest)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"a {manifest['kind']} must have its fields as its API has them; got a {type(error).__name__} at {error}. Check it "
            "against the schema too, by --schema, which names the field."
        ) from error


def _check_own_rules(manifest: Mapping[str, Any]) -> None:
    name = manifest.get("metadata", {}).get("name", "")
    if not DNS_LABEL.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"metadata.name must be a host name's label of at most {MAX_NAME} letters; got {name!r}. Rename it."
        )
    if manifest["kind"] == "JobSet":
        _check_jobset(manifest)


def _check_schema(manifest: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    try:
        import jsonschema
    except ImportError as error:
        raise ImportError(
            "checking against a schema needs the package jsonschema; got none. Install it: pip install 'jaxpar[kubernetes]'."
        ) from error
    errors = jsonschema.Draft202012Validator(strict(schema)).iter_errors(manifest)
    found = [f"{'.'.join(map(str, error.absolute_path)) or 'the top'}: {error.message}" for error in errors]
    if found:
        raise ValueError(f"a manifest must fit its API's schema; got {'; '.join(found)}. Correct these fields.")


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
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    return closed


def _check_jobset(manifest: Mapping[str, Any]) -> None:
    name = manifest["metadata"]["name"]
    for path, job in _jobs(manifest):
        spec = job["template"]["spec"]
        count = spec.get("parallelism")
        if count != spec.get("completions"):
            raise ValueError(
                f"{path}.parallelism must equal completions, the number of processes; got {count} and "
                f"{spec.get('completions')}. Make them equal."
            )
        for container in spec["template"]["spec"]["containers"]:
            told = {variable["name"]: variable for variable in container.get("env", [])}
            _check_environment(told, count, f"{name}-{job['name']}-0-0.", path)


def _jobs(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, job in enumerate(manifest["spec"]["replicatedJobs"]):
        path = f"spec.replicatedJobs.{number}"
        if job.get("replicas", 1) != 1:
            raise ValueError(
                f"{path}.replicas must be 1, since processes are numbered inside a Job; got {job['replicas']}. Raise its "
                "parallelism and completions."
            )
        yield path, job


def _check_environment(told: Mapping[str, Any], count: int, host: str, path: str) -> None:
    processes = told.get("JAX_NUM_PROCESSES", {}).get("value")
    if processes is not None and processes != str(count):
        raise ValueError(
            f"JAX_NUM_PROCESSES must be the number of pods; got {processes}, {path}.parallelism {count}. Make them equal."
        )
    address = told.get("JAX_COORDINATOR_ADDRESS", {}).get("value", host)
    if not address.startswith(host):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS must be pod 0's host, {host}...; got {address}. Correct it.")
    number = told.get("JAX_PROCESS_ID", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", INDEX)
    if number != INDEX:
        raise ValueError(f"JAX_PROCESS_ID must be the pod's number, {INDEX}; got {number}. Correct it.")
