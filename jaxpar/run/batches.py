"""The batches of a run on its mesh: how many microbatches, whether there are enough rows, and the rows of each step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from jaxpar.data.batches import RowSource, round_up
from jaxpar.data_parallel import abstract_batch, local_rows, shard_batch
from jaxpar.fields import arg
from jaxpar.mesh import ROWS, num_replicas, shown_sizes
from jaxpar.run.flags import RunFlags
from jaxpar.run.messages import checks, say, stop
from jaxpar.run.run import Run
from jaxpar.runtime.coordination import check_agreement
from jaxpar.runtime.exit_codes import ExitCode

Flags = TypeVar("Flags", bound=RunFlags)


def check_microbatches(
    flags: RunFlags,
    num_microbatches: int | None,
    num_rows: int,
    mesh: Any,
    *,
    unit: str = "row",
    of: str = "",
    keeps_mesh: bool = False,
) -> int:
    """Returns the number of microbatches; raises where a step has too few rows for them.

    Args:
        flags: The run's flags, with a --batch-size among the common ones.
        num_microbatches: The --num-microbatches; None: 2 for each stage of a pipeline, else 1.
        num_rows: Rows to learn from.
        mesh: The run's mesh, or what has its ``shape``.
        unit: Name of a row, for messages.
        of: What the rows consist of, for messages.
        keeps_mesh: Whether the mesh is that of a job, which has as many devices, so that no message advises another one.
    """
    batch_size: int = getattr(flags.common, "batch_size")  # noqa: B009, of the script's own flags
    replica, data, stage = mesh.shape.get("replica", 1), mesh.shape["data"], mesh.shape["stage"]
    flags_of_mesh, that_fit = (
        flags_of_replicas(replica, data),
        partial(_that_fit, replica=replica, data=data),
    )
    count = (2 * stage if stage > 1 else 1) if num_microbatches is None else num_microbatches
    parts = replica * data * count
    if count < 1:
        raise ValueError(
            f"--num-microbatches must be at least 1; got {count}. Leave it out for the default."
        )
    is_possible = 1 <= batch_size <= num_rows
    given = f"{flags_of_mesh}, {count} microbatches, --batch-size {batch_size}"
    may_change = flags.may_change("batch_size")
    if is_possible and batch_size < parts and not may_change:
        given, remedy = f"{given} of the run to resume", that_fit(batch_size, count, batch_size)
        if keeps_mesh:
            remedy = _on_this_mesh(batch_size, count, replica * data, may_change=False)
    elif parts > num_rows:
        given = f"{given}, {num_rows} {unit}s to learn from{of}"
        remedy = f"{that_fit(batch_size, count, num_rows)}, or give more {unit}s: {parts} or more"
    elif not is_possible:
        usual = round_up(min(32, num_rows), parts)
        raise ValueError(
            f"--batch-size must be from 1 to the number of {unit}s to learn from; got {batch_size}, {num_rows} {unit}s{of}. "
            f"Choose such as {usual if usual <= num_rows else parts}."
        )
    elif batch_size < parts and keeps_mesh:
        remedy = _on_this_mesh(batch_size, count, replica * data, may_change=True)
    elif batch_size < parts:
        remedy = f"--batch-size {parts} or more, or {that_fit(batch_size, count, batch_size)}"
    else:
        return count
    raise ValueError(
        f"each microbatch of each replica must have a {unit}; got {given}. Choose {remedy}."
    )


def flags_of_replicas(replica: int, data: int) -> str:
    """Returns the flags that say how many replicas there are, for messages."""
    return f"--mesh.data {data}" if replica == 1 else f"--mesh.replica {replica} --mesh.data {data}"


def _that_fit(batch_size: int, count: int, num_rows: int, *, replica: int, data: int) -> str:
    """Returns all flags to change for a step that fits the rows, with values that fit one another."""
    replicas = min(replica * data, num_rows)
    each = min(count, num_rows // replicas)
    fewer = (
        f"--mesh.data {replicas}" if replica == 1 else f"--mesh.replica 1 --mesh.data {replicas}"
    )
    flags = [fewer] * (replicas < replica * data) + [f"--num-microbatches {each}"] * (each < count)
    if not replicas * each <= batch_size <= num_rows:
        flags.append(f"--batch-size {replicas * each}")
    return " ".join(flags)


def _on_this_mesh(batch_size: int, count: int, replicas: int, *, may_change: bool) -> str:
    """Returns the flags to change, other than the mesh, for a step that has a row for each microbatch of each replica."""
    larger = f"--batch-size {replicas * count} or more"
    if batch_size < replicas:
        return larger if may_change else f"{larger} with --allow-change batch_size"
    fewer = f"--num-microbatches {batch_size // replicas}"
    return f"{larger}, or {fewer}" if may_change else fewer


def in_rows(flags: Flags, mesh: Any) -> Flags:
    """Returns the flags of a language model with --batch-size and --num-microbatches in place of those given in tokens."""
    given: Any = getattr(flags, "data")  # noqa: B009, of the script's own flags, as is --batch-size
    common: Any = flags.common
    for flag, tokens, other, is_given in (
        (
            "batch-tokens",
            given.batch_tokens,
            "batch-size",
            common.batch_size != type(common).batch_size,
        ),
        (
            "microbatch-tokens",
            given.microbatch_tokens,
            "num-microbatches",
            given.num_microbatches is not None,
        ),
    ):
        if tokens is None:
            continue
        if is_given:
            raise ValueError(
                f"--{flag} takes the place of --{other}; got both. Leave one of them out."
            )
        if tokens < given.seq or tokens % given.seq:
            raise ValueError(
                f"--{flag} must be a multiple of --seq, the tokens of a row; got {tokens} and {given.seq}. Choose "
                f"{max(round(tokens / given.seq), 1) * given.seq}."
            )
    batch_size = (
        common.batch_size if given.batch_tokens is None else given.batch_tokens // given.seq
    )
    flags = flags.replace(batch_size=batch_size, batch_tokens=None)
    if given.microbatch_tokens is None:
        return flags
    of_mesh = flags_of_replicas(mesh.shape["replica"], mesh.shape["data"])
    replica, rows = batch_size // num_replicas(mesh), given.microbatch_tokens // given.seq
    if replica * num_replicas(mesh) != batch_size or replica % rows:
        fitting = [n for n in range(1, max(replica, 1) + 1) if replica % n == 0]
        nearest = max(n for n in fitting if n <= max(rows, 1))
        raise ValueError(
            "--microbatch-tokens must divide the tokens of a replica in a step; got "
            f"{given.microbatch_tokens}, a step of {batch_size * given.seq} tokens, {of_mesh}. "
            f"Choose {nearest * given.seq}, or a batch that is a multiple."
        )
    return flags.replace(num_microbatches=replica // rows, microbatch_tokens=None)


def check_replicas(flags: RunFlags, batch_size: int | None, num_rows: int, mesh: Any) -> int:
    """Returns the rows of a step of a model without microbatches; raises where there are fewer, or the mesh needs more.

    Args:
        flags: The run's flags.
        batch_size: The --batch-size; None: all rows.
        num_rows: Rows to learn from.
        mesh: The run's mesh.
    """
    batch_size, data = num_rows if batch_size is None else batch_size, num_replicas(mesh)
    check_no_sequences(mesh)
    if mesh.shape["stage"] > 1:
        raise ValueError(
            f"linear regression is one layer and so one stage; got --mesh.stage {mesh.shape['stage']}. Use --mesh.stage 1."
        )
    if not 1 <= batch_size <= num_rows:
        raise ValueError(
            f"--batch-size must be from 1 to the number of rows; got {batch_size}, {num_rows} rows. "
            f"Choose 1 to {num_rows}, or leave it out for all rows."
        )
    if batch_size < data:
        larger = (
            f"--batch-size {data} or more, or "
            if data <= num_rows and flags.may_change("batch_size")
            else ""
        )
        fewer = f"--mesh.data {batch_size}" + (" or less" if batch_size > 1 else "")
        fewer = fewer if mesh.shape["replica"] == 1 else f"--mesh.replica 1 {fewer}"
        sizes = arg(**shown_sizes({axis: mesh.shape[axis] for axis in ROWS}))
        raise ValueError(
            f"each replica must have a row of every step; got {batch_size} row{'s' * (batch_size != 1)} a step, {sizes}. "
            f"Choose {larger}{fewer}."
        )
    return batch_size


def check_no_sequences(mesh: Any) -> None:
    """Raises for a mesh that would split the sequences of a model that has none."""
    if (context := mesh.shape["context"]) > 1:
        raise ValueError(
            f"--mesh.context splits sequences, which these rows are not; got --mesh.context {context}. Use --mesh.context 1."
        )


class Batches:
    """The batches of a run on its mesh, from rows that all processes can read: ``Run.compile`` checks that they are the same.

    Args:
        run: The run, whose seed and position in the data they follow.
        rows: The rows to learn from.
        batch_size: Rows of a step; rows of weight 0 are added to make whole microbatches.
        num_microbatches: Microbatches of each replica in a step.
    """

    def __init__(self, run: Run, rows: RowSource, batch_size: int, num_microbatches: int) -> None:
        self._run, self._rows, self._batch_size = run, rows, batch_size
        self._multiple = num_replicas(run.mesh) * num_microbatches
        self._num_rows = round_up(batch_size, self._multiple)
        self._local = local_rows(self._num_rows, run.mesh)
        run.must_agree("rows to learn from", lambda: describe_rows(rows))

    def __call__(self, step: int) -> dict[str, jax.Array]:
        """Returns the batch of a step."""
        return shard_batch(self._read(step), self._run.mesh, num_rows=self._num_rows)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings of a batch."""
        shape = lambda column: jax.ShapeDtypeStruct(
            (self._num_rows, *column.shape[1:]), column.dtype
        )
        return abstract_batch(jax.tree.map(shape, self._read(self._run.first_step)), self._run.mesh)

    def _read(self, step: int) -> dict[str, np.ndarray]:
        where = {"seed": self._run.flags.common.seed, "step": step, "origin": self._run.origin}
        with bad_data():
            return self._rows.batch(
                self._batch_size, **where, multiple=self._multiple, only=self._local
            )


def held_out_batches(
    batch_size: int, num_rows: int, test: RowSource, mesh: Any, num_microbatches: int = 1
) -> list[dict[str, jax.Array]]:
    """Returns some rows of the text held out, the same for every mesh; rows of weight 0 make whole microbatches.

    Raises:
        ConfigError: Processes of the run have other rows.
    """
    if jax.process_count() > 1:
        with checks():
            check_agreement("evaluate", {"rows held out": describe_rows(test)})
    size, multiple = min(batch_size, len(test)), num_replicas(mesh) * num_microbatches
    count, padded = -(-min(num_rows, len(test)) // size), round_up(size, multiple)
    num_read = min(count * size, len(test))
    more = f", in whole batches, for the {num_rows:,} asked for" if num_read > num_rows else ""
    say(f"an evaluation reads {num_read:,} of {len(test):,} rows held out{more}")
    read = {"seed": 0, "multiple": multiple, "only": local_rows(padded, mesh)}
    with bad_data():
        batches = [test.batch(size, step=step, **read) for step in range(count)]
    return [shard_batch(batch, mesh, num_rows=padded) for batch in batches]


def describe_rows(rows: RowSource) -> str:
    """Returns how many rows there are and their checksum, for the processes of a run to compare."""
    return f"{len(rows):,} rows, {rows.checksum()}"


@contextmanager
def bad_data() -> Iterator[None]:
    """Ends the run with exit code 65 where rows that were not read before cannot be used."""
    try:
        yield
    except ValueError as error:
        stop(ExitCode.BAD_DATA, str(error))
