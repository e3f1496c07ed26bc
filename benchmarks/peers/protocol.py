"""The protocol of a peer: a process that takes a step when it is asked to, so that all peers can take turns.

driver -> peer   a line "step" or "stop"
peer -> driver   a line of JSON: first {"compile_seconds", "versions", "loss"}, then for each step {"wall_seconds",
                 "cpu_seconds", "loss"}, at the end {"peak_bytes"}
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable

LEARNING_RATE, NUM_MICROBATCHES = 0.05, 8


def use_cpu_devices(num_devices: int, *, wait_for_one_another: bool) -> None:
    """Gives JAX CPU devices, and XLA as few threads as they need if each step ends before the next is dispatched.

    ``jaxpar.use_fake_devices`` gives more, so that any number of steps may be dispatched. On 2 cores the threads of 4 devices
    that it adds cost a peer of either library 4 to 10% of its time.

    Args:
        num_devices: The number of devices.
        wait_for_one_another: Whether a program runs on several devices, each of which holds a thread while it waits for the
            others. Otherwise XLA's own number of threads is enough.
    """
    import jax

    if wait_for_one_another:
        os.environ["PJRT_NPROC"] = str(max(num_devices + 1, os.cpu_count() or 1))
    else:
        os.environ.pop("PJRT_NPROC", None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def serve(
    step: Callable[[], float],
    *,
    versions: str,
    cpu_seconds: Callable[[], float] = time.process_time,
) -> None:
    """Answers the driver until it says stop.

    Args:
        step: Trains one step and returns its loss, once all that it does is done. The first call compiles.
        versions: What runs.
        cpu_seconds: CPU time of all that belongs to this peer.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    say = lambda **figures: print(json.dumps(figures), file=answers)
    start = time.perf_counter()
    loss = step()
    say(compile_seconds=time.perf_counter() - start, versions=versions, loss=loss)
    for line in sys.stdin:
        if line.strip() == "stop":
            break
        wall, cpu = time.perf_counter(), cpu_seconds()
        loss = step()
        say(wall_seconds=time.perf_counter() - wall, cpu_seconds=cpu_seconds() - cpu, loss=loss)
    say(peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
