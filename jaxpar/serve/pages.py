"""The pages of a server about itself: /docs, its interface, and /metrics, for Prometheus."""

import json
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import prometheus_client
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

import jaxpar
from jaxpar.metrics.exporters import Totals
from jaxpar.serve.requests import Served

BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120)  # seconds
ERRORS = json.loads(Path(__file__).with_name("errors.json").read_text())  # what each status means
UNREADY = {
    "/healthz": {"503": {"description": "One request has taken too long."}},
    "/readyz": {
        "503": {"description": "The model is being loaded, or the server is about to stop."}
    },
}
PAGE, POST = (
    Template(Path(__file__).with_name(name).read_text()) for name in ("docs.html", "docs_post.html")
)


class Problem(BaseModel):
    """What is wrong with a request, as OpenAI's API has it."""

    message: str = Field(description="the rule, the value and the remedy")
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: Problem


class ServerMetrics:
    """The metrics of a server at /metrics, in the format of Prometheus.

    Args:
        usage: Counts of what was computed, by kind, which the model keeps.
        num_waiting: Returns the number of requests that wait.
        num_running: Returns the number of requests that are computed: 0 or 1.
    """

    def __init__(
        self,
        usage: Mapping[str, int],
        num_waiting: Callable[[], int],
        num_running: Callable[[], int],
    ) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        where: dict[str, Any] = {"registry": self._registry}
        self._requests = prometheus_client.Counter(
            "jaxpar_serve_requests",
            "Requests answered, by path and status.",
            ("path", "code"),
            **where,
        )
        name, about = "jaxpar_serve_request_seconds", "Seconds until the end of the response."
        self._seconds = prometheus_client.Histogram(
            name, about, ("path",), buckets=BUCKETS, **where
        )
        gauge = lambda name, about: prometheus_client.Gauge(f"jaxpar_serve_{name}", about, **where)
        gauge("waiting_requests", "Requests that wait for their turn.").set_function(num_waiting)
        gauge("running_requests", "Requests that are computed, 0 or 1.").set_function(num_running)
        about = lambda kind: (f"jaxpar_serve_{kind}", f"The {kind.replace('_', ' ')} so far.")
        self._registry.register(
            Totals(lambda: {about(kind): count for kind, count in usage.items()})
        )
        prometheus_client.ProcessCollector(**where)

    def answered(self, path: str, code: int, seconds: float) -> None:
        """Counts a response."""
        self._requests.labels(path, str(code)).inc()
        self._seconds.labels(path).observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """Returns the metrics and their content type."""
        return prometheus_client.generate_latest(
            self._registry
        ), prometheus_client.CONTENT_TYPE_LATEST


def describe(served: Served, pages: Mapping[str, str]) -> dict[str, Any]:
    """Returns the interface of a server as OpenAPI has it.

    Args:
        served: The model.
        pages: What each path is that takes GET.
    """
    kinds = [endpoint.body for endpoint in served.endpoints] + [ErrorBody]
    where = "#/components/schemas/{model}"
    found, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=where
    )
    schema_of = {kind: schema for (kind, _), schema in found.items()}
    content = lambda **about: {"content": {"application/json": about}}
    errors = {
        code: {"description": about} | content(schema=schema_of[ErrorBody])
        for code, about in ERRORS.items()
    }
    posts = {
        each.path: {
            "post": {
                "summary": each.summary,
                "requestBody": content(schema=schema_of[each.body] | {"examples": [each.example]})
                | {"required": True},
                "responses": {
                    "200": {"description": "The answer."} | content(example=each.response),
                    **errors,
                },
            }
        }
        for each in served.endpoints
    }
    done = {"200": {"description": "The answer."}}
    gets = {
        path: {"get": {"summary": about, "responses": done | UNREADY.get(path, {})}}
        for path, about in pages.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": served.name, "description": served.about, "version": jaxpar.__version__},
        "paths": posts | gets,
        "components": {"schemas": schemas["$defs"]},
    }


def docs_page(description: Mapping[str, Any], url: str) -> str:
    """Returns an OpenAPI description as one page, without scripts and without files from elsewhere.

    Args:
        description: The description.
        url: Where the server is, for the commands to try.
    """
    info, schemas = description["info"], description["components"]["schemas"]
    posts = "".join(
        _section(path, at["post"], schemas, url)
        for path, at in description["paths"].items()
        if "post" in at
    )
    gets = "".join(
        f'<tr><td><a href="{escape(path)}">GET {escape(path)}</a></td><td>{escape(at["get"]["summary"])}</td></tr>'
        for path, at in description["paths"].items()
        if "get" in at
    )
    return PAGE.substitute(
        {name: escape(text) for name, text in info.items()}, posts=posts, gets=gets
    )


def _section(path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any], url: str) -> str:
    """Returns what the page has about an operation: a command to try, its response, the fields of the body, the errors."""
    schema, responses = (
        operation["requestBody"]["content"]["application/json"]["schema"],
        operation["responses"],
    )
    example = json.dumps(schema["examples"][0]).replace("'", "'\\''")  # as a shell reads it
    command = f"curl {url}{path} -H 'Content-Type: application/json' -d '{example}'"
    answer = json.dumps(responses["200"]["content"]["application/json"]["example"], indent=2)
    rows = lambda found: "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in found
    )
    errors = [
        (code, response["description"]) for code, response in responses.items() if code != "200"
    ]
    texts = {"path": path, "summary": operation["summary"], "command": command, "answer": answer}
    tables = {"fields": rows(_fields(schema, schemas)), "errors": rows(errors)}
    return POST.substitute({name: escape(text) for name, text in texts.items()} | tables)


def _fields(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yields the fields of an object, with those inside: the path, what it must be, and whether it is required."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for name, part in schema.get("properties", {}).items():
        yield f"{above}{name}", _rule(part), "required" * (name in schema.get("required", ()))
        yield from _fields(part, schemas, f"{above}{name}.")
    for part in schema.get("anyOf", ()):
        yield from _fields(part, schemas, above)
    yield from (
        _fields(schema["items"], schemas, f"{above.removesuffix('.')}[].")
        if "items" in schema
        else ()
    )


def _rule(schema: Mapping[str, Any]) -> str:
    """Returns what a value must be, as text."""
    kinds = schema.get("anyOf", [])
    bounds = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "minItems": "items >=",
        "maxItems": "items <=",
    }
    words = [schema[name] for name in ("description", "type") if name in schema]
    words += [" or ".join(json.dumps(value) for value in schema.get("enum", ()))]
    words += [f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema]
    words += (
        [" or ".join(map(_rule, kinds))] if len(kinds) == 2 or "description" not in schema else []
    )
    return ", ".join(filter(None, words))
