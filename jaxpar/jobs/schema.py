"""Checks a manifest against its API's own schema, with unknown fields forbidden, and against rules that no schema expresses.

The schema is the ``openAPIV3Schema`` of a CustomResourceDefinition, as JSON. Get it from a cluster by
``kubectl get crd jobsets.jobset.x-k8s.io -o json``: it is in ``spec.versions[].schema``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxpar.jobs.rules import API_VERSIONS, check_rules, check_together
from jaxpar.runtime.extras import install_extra

INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


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
    kind = manifest.get("kind") if isinstance(manifest, Mapping) else type(manifest).__name__
    if not isinstance(manifest, Mapping) or kind not in API_VERSIONS:
        raise ValueError(
            f"a manifest must be of a kind that `manifest` writes, {', '.join(API_VERSIONS)}; got kind {str(kind)[:80]}. "
            "Leave it out."
        )
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"a schema must be a JSON object; got a {type(schema).__name__}. Take it from the cluster."
            )
        _check_schema(manifest, schema)
    with _fields_as_in_the_api(kind):
        check_rules(manifest)


@contextmanager
def _fields_as_in_the_api(kind: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"a {kind} must have its fields as its API has them; got a {type(error).__name__} at {error}. Check it against the "
            "schema too, by --schema, which names the field."
        ) from error


def check_manifests(manifests: Sequence[Any], schema: Any = None) -> None:
    """Raises unless each manifest of a file is one that ``check_manifest`` takes, and they fit one another.

    Args:
        manifests: The manifests, as read from the documents of a YAML file.
        schema: The schema of their API, as ``check_manifest`` takes it.

    Raises:
        ValueError: A manifest is not valid, there is none, or they are of several kinds and a schema is given.
        ImportError: A schema is given, and jsonschema is not installed.
    """
    if not manifests:
        raise ValueError("a manifest must hold a document; got none. Write one with `manifest`.")
    kinds = sorted({str(each.get("kind"))[:80] for each in manifests if isinstance(each, Mapping)})
    if schema is not None and len(kinds) > 1:
        raise ValueError(
            f"a schema is that of one kind; got a file of {', '.join(kinds)}. Check them in files of their own."
        )
    for number, manifest in enumerate(manifests, 1):
        try:
            check_manifest(manifest, schema)
        except ValueError as error:
            if len(manifests) == 1:
                raise
            raise ValueError(f"document {number}: {error}") from error
    with _fields_as_in_the_api("Service"):
        check_together(manifests)


def _check_schema(manifest: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    try:
        import jsonschema
    except ImportError as error:
        raise ImportError(
            f"checking against a schema needs the package jsonschema; got none. {install_extra('kubernetes')}."
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
