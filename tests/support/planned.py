"""A plan as `plan --json` writes it, of a model of one's own that needs no flag."""

from typing import Any

PLAN: dict[str, Any] = {
    "data": 8,
    "stage": 1,
    "tensor": 1,
    "replica": 1,
    "context": 1,
    "schedule": "1f1b",
    "executor": "spmd",
    "batch_size": 64,
    "num_microbatches": 1,
    "num_chunks": 1,
    "zero": 0,
    "remat": False,
    "own_model": "my_model:SHAPE",
}
