"""Shared by the parts: the time that is left, candidates that may fail, and the work that they measure."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timing
from gpt_training import GIB, TINY, WORKS, Work

RESERVE_SECONDS = 20.0  # to time candidates that are compiled


@dataclass(frozen=True)
class Context:
    """What a part is given.

    Attributes:
        part: Its name.
        folder: A folder for files, the same for all parts.
        smoke: Whether it runs a tiny case on any machine.
        until: The time by ``time.time()`` at which it has to be done.
        all_until: The same for the whole run.
        torch_python: The interpreter that has PyTorch; empty: PyTorch is left out.
    """

    part: str
    folder: Path
    smoke: bool
    until: float
    all_until: float
    torch_python: str = ""

    @property
    def left(self) -> float:
        """Seconds that are left for the part."""
        return self.until - time.time()

    def say(self, text: str) -> None:
        """Prints a line with the minutes that are left, for the part and in all."""
        left = [max(0.0, until - time.time()) / 60 for until in (self.until, self.all_until)]
        print(f"[{left[0]:4.1f} min left of {self.part}, {left[1]:4.1f} in all] {text}", flush=True)

    def work(self, name: str, **changes: Any) -> Work:
        """Returns one of the models and batches of ``WORKS``, with some fields changed; in a smoke run made tiny."""
        tiny = {"smoke": True} | TINY | changes
        return dataclasses.replace(WORKS[name], **(tiny if self.smoke else changes))


@dataclass
class Candidates:
    """Programs that are compiled, run once, and then timed in turn. One that fails is left out, and the note says why."""

    context: Context
    turn: int = 1
    runs: dict[str, Callable] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    longest: float = 0.0

    def add(self, name: str, function: Callable, *args: Any, check: Callable | None = None) -> None:
        """Compiles a function, runs it once, and keeps it as a candidate.

        Args:
            name: Its name in the tables.
            function: A function of ``args``; a candidate's run calls it ``turn`` times and keeps the first of its results.
            *args: Its arguments.
            check: Called with the results of the first run; returns facts about them, by column.
        """
        import jax

        self.add_run(name, lambda: jax.jit(function).lower(*args).compile(), *args, check=check)

    def add_run(self, name: str, make: Callable, *args: Any, check: Callable | None = None) -> None:
        """Does the same for a function that ``make()`` returns, compiled or not."""
        import jax

        if self.context.left < max(1.5 * self.longest, self.longest + RESERVE_SECONDS):
            self.left_out[name] = "no time was left"
            return
        began = time.perf_counter()
        try:
            run = make()
            facts = {"compile s": time.perf_counter() - began} | temporary(run)
            results = run(*args)
            jax.block_until_ready(results)
            facts |= check(results) if check else {}
            del results
        except Exception as error:  # such as too little memory, which is an answer too
            self.left_out[name] = in_words(error)
        else:
            first = lambda results: results[0] if isinstance(results, tuple | list) else results
            self.runs[name] = lambda: [first(run(*args)) for _ in range(self.turn)]
            self.facts[name] = facts
        self.longest = max(self.longest, time.perf_counter() - began)
        self.context.say(
            f"{name}: {self.left_out.get(name) or f'compiled in {time.perf_counter() - began:.0f} s'}"
        )

    def timed(self, reference: str, repeats: int = 7) -> dict[str, timing.Timing]:
        """Times the candidates in turn, in at most ``repeats`` rounds, fewer where time runs out.

        If the reference is left out the first of the others takes its place.

        Raises:
            RuntimeError: No candidate ran.
        """
        import jax

        began = time.perf_counter()
        for name, run in list(self.runs.items()):
            try:
                jax.block_until_ready(run())
            except Exception as error:  # such as too little memory beside what the others hold
                self.left_out[name] = in_words(error)
                del self.runs[name]
        if not self.runs:
            raise RuntimeError(f"no candidate ran. {self.note()}")
        one_round = time.perf_counter() - began
        repeats = (
            1
            if self.context.smoke
            else max(1, min(repeats, int(0.7 * self.context.left / one_round) - 1))
        )
        first = reference if reference in self.runs else next(iter(self.runs))
        timings = timing.measure(self.runs, reference=first, repeats=repeats)
        for name, timed in timings.items():
            self.context.say(f"{name}: {timed.wall_seconds / self.turn * 1e3:.3f} ms")
        return timings

    def note(self) -> str:
        """Returns what was left out, and why."""
        return "".join(f" Left out: {name} ({why})." for name, why in self.left_out.items()).strip()


def temporary(run: Any) -> dict[str, Any]:
    """Returns the temporary memory of a compiled program; nothing for other functions."""
    if not hasattr(run, "memory_analysis"):
        return {}
    return {"temporary GiB": run.memory_analysis().temp_size_in_bytes / GIB}


def in_words(error: BaseException) -> str:
    """Returns an error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def off_by(found: Any, expected: Any) -> float:
    """Returns how far a tree of arrays is from the expected one: the norm of the difference over the norm."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def squares(found: Any, expected: Any) -> tuple[Any, Any]:
        wide = lambda a: a.astype(jnp.float32)
        total = lambda tree: sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree))
        return total(jax.tree.map(lambda a, b: wide(a) - wide(b), found, expected)), total(
            jax.tree.map(wide, expected)
        )

    difference, size = squares(found, expected)
    return float(difference / size) ** 0.5


def gpu_of(device: Any) -> str | None:
    """Returns the planner's name of a GPU; None for other devices."""
    kind = device.device_kind
    if "A100" in kind:
        return "a100-80gb" if "80GB" in kind else "a100-40gb"
    return next((name for name in ("h100", "h200", "b200") if name.upper() in kind), None)
