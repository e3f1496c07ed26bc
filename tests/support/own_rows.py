"""Reads the batches of some steps, in each process of a job, and writes what was read.

    python -m jaxpar launch -n 2 --devices-per-process 2 tests/support/own_rows.py FOLDER FIRST_STEP END OUT

FOLDER has rows-0.parquet and rows-1.parquet. OUT gets a file for each process: OUT-0.json.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import jaxpar
from jaxpar.data.batches import Mixture
from jaxpar.data.records import RecordRows, Records, open_records

SEQ, VOCAB, BATCH = 8, 100, 13  # which the replicas do not divide: a batch has 3 rows of padding


class CountedRecords(Records):
    """The records of one file that remember which were read."""

    def __init__(self, file):
        self._records, self.read = open_records([file]), []

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        self.read.append(int(index))
        return self._records[index]


def read_steps(folder, mesh, steps):
    """Returns for each step the records that this process read, by file, the rows that were its own, and the whole batch."""
    files = [CountedRecords(Path(folder) / f"rows-{i}.parquet") for i in range(2)]
    source = Mixture([RecordRows(file, SEQ, vocab_size=VOCAB) for file in files], [3, 1])
    num_rows = jaxpar.data.batches.round_up(BATCH, mesh.shape["data"])
    only = jaxpar.local_rows(num_rows, mesh)
    found = []
    for step in steps:
        for file in files:
            file.read.clear()
        own = source.batch(BATCH, seed=0, step=step, multiple=mesh.shape["data"], only=only)
        batch = jaxpar.fetch(jaxpar.shard_batch(own, mesh, num_rows=num_rows))
        read = [[i, row] for i, file in enumerate(files) for row in file.read]
        wanted = source.rows(BATCH, seed=0, step=step)[only[only < BATCH]].tolist()
        found.append(
            {
                "read": sorted(read),
                "own": sorted(wanted),
                "batch": jax.tree.map(np.ndarray.tolist, batch),
            }
        )
    return found


def read_columns(mesh):
    """Returns the columns of two rows that this process reads, and the whole batch in the order of the devices."""
    rows, columns = jaxpar.local_rows(2, mesh, seq=2 * SEQ)
    place = np.arange(2 * SEQ) % 5  # in documents of five tokens
    batch = {
        "tokens": np.arange(4 * SEQ).reshape(2, -1),
        "positions": np.stack([place, place]),
        "row": np.arange(2),
    }
    batch["segments"] = np.stack([np.arange(2 * SEQ) // 5] * 2)
    own = {
        name: column[rows][:, columns] if column.ndim > 1 else column[rows]
        for name, column in batch.items()
    }
    found = jaxpar.fetch(jaxpar.shard_batch(own, mesh, num_rows=2, seq=2 * SEQ))
    return {"columns": columns.tolist(), "batch": jax.tree.map(np.ndarray.tolist, found)}


def main(folder, first, end, out):
    jaxpar.initialize()
    found = read_steps(
        folder, jaxpar.make_mesh(data=jax.device_count()), range(int(first), int(end))
    )
    found.append(read_columns(jaxpar.make_mesh(context=jax.device_count())))
    Path(f"{out}-{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
