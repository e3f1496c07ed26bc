"""The error that a client gets: a status, and a message with the rule, the value and the remedy."""

from typing import Any

from jaxpar.runtime.extras import install_extra


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: The HTTP status.
        message: The rule, the value and the remedy.
        param: The field of the body that is wrong, if it is one.
        code: A word for programs, such as ``model_not_found``.
        retry_after: Seconds after which to ask again; None: asking again does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Returns the body of the response, in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Returns the headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def missing_extra(package: str) -> ImportError:
    """Returns the error for a package of the extra that is not installed."""
    return ImportError(f"serving needs the package {package}; got none. {install_extra('serve')}.")
