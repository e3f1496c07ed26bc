"""A text stream that writes each message as one line of JSON, for systems that collect the output of pods.

{"time": "2026-11-22T12:55:44.120Z", "level": "info", "message": "compiled in 12.1 s"}

What is written between two flushes is one message: a message that Python prints with ``flush=True`` stays whole. The level of
one that begins with "error:", and of a traceback, is "error".
"""

import datetime
import io
import json
import math
import threading
from typing import Any, TextIO


class JsonStream(io.TextIOBase):
    """Wraps a stream, such as ``sys.stderr``.

    Args:
        stream: Where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self.wrapped = stream
        self._parts: list[str] = []
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the file descriptor of the wrapped stream."""
        return self.wrapped.fileno()

    def write(self, text: str) -> int:
        """Keeps text for the message that the next flush ends."""
        with self._lock:
            self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Writes what was written since the last flush as a message; blank text is none."""
        with self._lock:
            text, self._parts = "".join(self._parts).strip("\n"), []
        if text.strip():
            self.emit(level="error" if text.startswith(("error:", "Traceback")) else "info", message=text)

    def emit(self, **values: Any) -> None:
        """Writes a line with these values and the time; numbers that JSON does not have become null."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        with self._lock:
            self.wrapped.write(
                json.dumps({"time": now, **plain}) + "\n"
            )  # one write: another stream may share the file
            self.wrapped.flush()
