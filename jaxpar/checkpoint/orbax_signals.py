"""Makes the waits inside Orbax end when a save or a load is given up.

Only this module, `orbax_loop.py` and `orbax_tree.py` use Orbax.

Orbax's threads wait for one another, and for those of other processes, through one client: for keys that another thread sets
and at barriers. If one of them fails the others wait for 300 s, keep the program alive that long, and accumulate with each
save. This client replaces Orbax's: it waits in slices, and stops waiting once any process has given the operation up.

The module of Orbax's client is private, hence the upper bound on Orbax's version in pyproject.toml.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from orbax.checkpoint._src.futures import signaling_client

from jaxpar.checkpoint.orbax_loop import use_loop

SLICE_SECONDS = 1


class GivenUpError(RuntimeError):
    """Another thread or process failed in a save or a load."""


class Operation:
    """One save or load, by all processes. A process that fails gives it up for all.

    Args:
        name: The name of this operation, the same on all processes and unique to it.
        seconds: How long Orbax may wait in it.
        client: Orbax's own client.
    """

    def __init__(self, name: str, seconds: float, client: Any) -> None:
        self.name, self._client, self._seconds = name, client, seconds
        self._deadline = time.monotonic() + seconds
        self._over = threading.Event()

    @property
    def seconds_left(self) -> float:
        """The seconds that it may still take."""
        return max(self._deadline - time.monotonic(), 0.0)

    def end(self) -> None:
        """Ends every wait of this process in this operation."""
        self._over.set()

    def give_up(self) -> None:
        """Ends every wait in this operation, on all processes, with GivenUpError."""
        self.end()
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{self.name}/given-up", "yes", allow_overwrite=True)

    def check(self) -> None:
        """Raises GivenUpError if it was given up, TimeoutError if it has taken too long."""
        if self._over.is_set() or self._client.key_value_try_get(f"{self.name}/given-up") is not None:
            raise GivenUpError("another thread or process failed")
        self.check_time()

    def check_time(self) -> None:
        """Raises TimeoutError if it has taken too long."""
        if not self.seconds_left:
            raise TimeoutError(f"it took longer than {self._seconds:g} s")


class Client:
    """Orbax's signaling client with waits that can end early; outside an operation it behaves as Orbax's own.

    Args:
        inner: Orbax's own client.
    """

    def __init__(self, inner: Any) -> None:
        self._inner, self._num_operations = inner, 0
        self._operation: Operation | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, seconds: float) -> Operation:
        """Starts the next operation; every process must call it, after all have finished the previous one."""
        if jax.process_index() == 0:
            self._inner.key_value_delete(f"jaxpar/orbax/{self._num_operations}/")
        self._num_operations += 1
        self._operation = Operation(f"jaxpar/orbax/{self._num_operations}", seconds, self._inner)
        return self._operation

    def blocking_key_value_get(self, key: str, timeout_secs: int) -> str:
        """Waits until a key is set and returns its value."""
        operation = self._operation
        if operation is None:
            return self._inner.blocking_key_value_get(key, timeout_secs)
        while True:
            with _timeouts_suppressed():
                return self._inner.blocking_key_value_get(key, SLICE_SECONDS)
            operation.check()

    def wait_at_barrier(self, key: str, *, timeout_secs: int, process_ids: Sequence[int] | None = None) -> None:
        """Waits until all of the processes have arrived: the first waits for the others, and they wait for its signal."""
        operation = self._operation
        if operation is None:
            return self._inner.wait_at_barrier(key, timeout_secs=timeout_secs, process_ids=process_ids)
        processes = sorted(process_ids or range(jax.process_count()))
        barrier = f"{operation.name}/{key}"
        if jax.process_index() == processes[0]:
            for process in processes[1:]:
                self.blocking_key_value_get(f"{barrier}/{process}", timeout_secs)
            self._inner.key_value_set(f"{barrier}/all", "here")
        else:
            self._inner.key_value_set(f"{barrier}/{jax.process_index()}", "here")
            self.blocking_key_value_get(f"{barrier}/all", timeout_secs)


@contextlib.contextmanager
def _timeouts_suppressed():
    try:
        yield
    except TimeoutError:
        pass
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


@functools.cache
def client() -> Client:
    """Returns the client, which Orbax uses from now on, with the loops of ``orbax_loop.py``."""
    use_loop()
    ours = Client(signaling_client.get_signaling_client())
    signaling_client.get_signaling_client = functools.cache(lambda: ours)
    return ours
