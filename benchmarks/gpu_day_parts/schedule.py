"""What gpu_day.py measures, in the order of what is most wanted, and how it shares its minutes. Imports no JAX.

    all jobs fit       each may take twice its seconds, and what it leaves is for the others
    time is short      a job that would not fit is left out, and the next one is tried, which may be shorter
    a job takes long   it is ended when its time is over, and the least wanted ones are left out

So a run ends within its minutes whatever happens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PATIENCE = 2.0  # how many times its seconds a job may take before it is ended
GRACE = 10.0  # seconds after its time in which a job may still end by itself; as many are kept at the end of the run


@dataclass(frozen=True)
class Job:
    """What runs in a process of its own.

    Attributes:
        name: Its name.
        part: The module that measures it.
        args: What its ``measure`` gets beside the context.
        seconds: What it takes on an H100 with its start, which is 10 s; by what was measured, where it was.
    """

    name: str
    part: str
    args: tuple[str, ...]
    seconds: float


JOBS = (
    Job("training", "steps", ("llama", "jaxpar"), 50),
    Job("training-torch", "steps", ("llama", "PyTorch, torch.compile"), 70),
    Job("documents", "steps", ("documents", "jaxpar"), 30),
    Job("lora", "steps", ("lora", "jaxpar"), 45),
    Job("gpt2", "steps", ("gpt2", "jaxpar"), 30),
    Job("gpt2-torch", "steps", ("gpt2", "PyTorch, torch.compile"), 60),
    Job("experts", "steps", ("experts", "jaxpar"), 35),
    Job("decoding", "decoding", (), 35),
    Job("grouped", "grouped", (), 60),
    Job("wide", "steps", ("wide", "jaxpar"), 40),
    Job("kernels", "kernels", (), 30),
    Job("pipelines", "pipelines", (), 75),
    Job("training-checkpoint", "steps", ("llama", "jax.checkpoint, dots"), 35),
    Job("training-remat", "steps", ("llama", "jaxpar, remat dots"), 35),
    # For more minutes.
    Job("attention", "attention", (), 90),
    Job("gradients", "gradients", (), 180),
    Job("host_waits", "host_waits", (), 90),
    Job("checkpoint", "checkpoints", (), 240),
)
NAMES = tuple(job.name for job in JOBS)


@dataclass(frozen=True)
class Turn:
    """A job that is started, or left out.

    Attributes:
        job: The job.
        until: When it has to be done, by ``time.time()``; None: it is left out.
        left: The seconds that were left.
    """

    job: Job
    until: float | None
    left: float

    @property
    def why(self) -> str:
        """Why it is left out, in words."""
        return f"left out: {max(0, self.left):.0f} s were left, and it takes about {self.job.seconds:.0f}"


def turns(jobs: Sequence[Job], end: float, clock: Callable[[], float]) -> Iterator[Turn]:
    """Yields each job when its turn comes; reads the clock then.

    Args:
        jobs: The most wanted first.
        end: When all have to be done, with the grace of the last one.
        clock: Such as ``time.time``.
    """
    for job in jobs:
        now = clock()
        left = end - GRACE - now
        fits = job.seconds <= left
        yield Turn(job, now + min(left, PATIENCE * job.seconds) if fits else None, left)
