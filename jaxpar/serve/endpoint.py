"""The endpoints of a model over HTTP: paths, each with the schema of its requests and its replies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from jaxpar.serve.json_body import Schema, Validator


class Reply(Protocol):
    """The reply to one request whose body is right."""

    @property
    def is_stream(self) -> bool:
        """Whether it is sent in events while it is computed."""
        ...

    def work(self) -> Iterator[Any]:
        """Returns an iterator over the results, which computes them: it runs in the worker's thread."""
        ...

    def events(self, result: Any) -> Sequence[dict[str, Any]]:
        """Returns the events that a result adds to a stream."""
        ...

    def last_events(self) -> Sequence[dict[str, Any]]:
        """Returns the events at the end of a stream."""
        ...

    def whole(self, results: Sequence[Any]) -> dict[str, Any]:
        """Returns the body of a response that is no stream."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """A path that takes POST.

    Attributes:
        path: The path.
        summary: A sentence about it.
        schema: The JSON schema of a body; its ``examples`` are shown.
        response: An example of a response.
        make_reply: Returns the reply to a body that fits the schema; raises RequestError for one that is wrong otherwise.
    """

    path: str
    summary: str
    schema: Schema
    response: dict[str, Any]
    make_reply: Callable[[Any], Reply]

    @cached_property
    def validator(self) -> Validator:
        """Checks bodies."""
        return Validator(self.schema)


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    Attributes:
        name: Its name.
        about: What it is.
        endpoints: What it offers.
        first: A body for the first endpoint, computed before the model is ready, so that its program is compiled.
        is_language_model: Whether it is listed under /v1/models.
        usage: Counts of what was computed so far, by kind, for the metrics.
    """

    name: str
    about: str
    endpoints: tuple[Endpoint, ...]
    first: Any
    is_language_model: bool = False
    usage: dict[str, int] = field(default_factory=dict)
