"""The OpenAPI description of a model's endpoints: /openapi.json."""

from typing import Any

import jaxpar
from jaxpar.serve.endpoint import Endpoint, Served

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "the rule, the value and the remedy"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    "400": "The body is wrong.",
    "404": "There is no such path or model.",
    "405": "The path does not take this method: Allow names those that it takes.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "500": "The server failed, or the model's scores are not finite.",
    "503": "Too many requests wait, time ran out, or the server is about to stop: Retry-After says when to ask again.",
}
PLAIN = {
    "/docs": "This interface as a page.",
    "/openapi.json": "This interface as OpenAPI 3.1.",
    "/healthz": "Whether the process works.",
    "/readyz": "Whether requests are taken: 503 before the model is loaded, and once the server is told to stop.",
    "/metrics": "Metrics for Prometheus.",
}
MODELS = {"/v1/models": "The model that is served."}


def describe(served: Served) -> dict[str, Any]:
    """Returns the description of all paths of a server."""
    plain = PLAIN | (MODELS if served.is_language_model else {})
    paths = {endpoint.path: {"post": _operation(endpoint)} for endpoint in served.endpoints}
    paths |= {
        path: {"get": {"summary": about, "responses": {"200": {"description": "OK"}}}} for path, about in plain.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": served.name, "description": served.about, "version": jaxpar.__version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content = lambda schema: {"application/json": schema}
    error = content({"schema": {"$ref": "#/components/schemas/Error"}})
    return {
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": content({"schema": endpoint.schema})},
        "responses": {
            "200": {"description": "The answer.", "content": content({"example": endpoint.response})},
            **{code: {"description": about, "content": error} for code, about in ERRORS.items()},
        },
    }
