"""jaxpar trains a pure JAX function on any number of devices: data, pipeline and tensor parallelism over one mesh.

A name is imported when it is first used (PEP 562), so that ``import jaxpar`` imports no JAX and a program pays for what it
uses. To add a name, add it to the imports for type checkers, to ``__all__`` and to ``_NAMES``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jaxpar._near_names import no_attribute, public_names

if TYPE_CHECKING:
    from jaxpar import adapters, collectives, huggingface, losses, planner, schedule
    from jaxpar.backward.remat import min_cut_remat
    from jaxpar.checkpoint import CheckpointManager
    from jaxpar.compile_only import compile_only_devices
    from jaxpar.data import batches
    from jaxpar.data_parallel import abstract_batch, local_rows, shard_batch
    from jaxpar.gradients import value_and_grad
    from jaxpar.inspect import inspect_step
    from jaxpar.layered_model import LayeredModel, PackedLayers
    from jaxpar.mesh import make_mesh
    from jaxpar.parallel import Parallel, Pipeline
    from jaxpar.params import ParamSpec
    from jaxpar.pipeline import LayerLayout
    from jaxpar.planner import plan
    from jaxpar.runtime.distributed import initialize, use_fake_devices
    from jaxpar.sharding import fetch, replicated, shard, shardings_from_dims, shardings_from_paths
    from jaxpar.tensor_parallel import column_parallel, flash_attention, row_parallel, sequence_parallel, vocab_parallel
    from jaxpar.train import TrainState, abstract_state, init_state, make_eval_step, make_train_step

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "LayerLayout",
    "LayeredModel",
    "PackedLayers",
    "Parallel",
    "ParamSpec",
    "Pipeline",
    "TrainState",
    "abstract_batch",
    "abstract_state",
    "adapters",
    "batches",
    "collectives",
    "column_parallel",
    "compile_only_devices",
    "fetch",
    "flash_attention",
    "huggingface",
    "init_state",
    "initialize",
    "inspect_step",
    "local_rows",
    "losses",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "min_cut_remat",
    "plan",
    "planner",
    "replicated",
    "row_parallel",
    "schedule",
    "sequence_parallel",
    "shard",
    "shard_batch",
    "shardings_from_dims",
    "shardings_from_paths",
    "use_fake_devices",
    "value_and_grad",
    "vocab_parallel",
]

_NAMES = {  # of __all__, by the module that has them; the others are modules themselves
    "backward.remat": "min_cut_remat",
    "checkpoint": "CheckpointManager",
    "compile_only": "compile_only_devices",
    "data": "batches",
    "data_parallel": "abstract_batch local_rows shard_batch",
    "gradients": "value_and_grad",
    "inspect": "inspect_step",
    "layered_model": "LayeredModel PackedLayers",
    "mesh": "make_mesh",
    "parallel": "Parallel Pipeline",
    "params": "ParamSpec",
    "pipeline": "LayerLayout",
    "planner": "plan",
    "runtime.distributed": "initialize use_fake_devices",
    "sharding": "fetch replicated shard shardings_from_dims shardings_from_paths",
    "tensor_parallel": "column_parallel flash_attention row_parallel sequence_parallel vocab_parallel",
    "train": "TrainState abstract_state init_state make_eval_step make_train_step",
}
_MODULE_OF = {name: f"jaxpar.{module}" for module, names in _NAMES.items() for name in names.split()}
# Where a misspelt name is looked for too, the last one first.
_PARTS = ("huggingface", "planner", "collectives", "schedule", "losses")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # of a module that is imported next, or of other programs
        raise no_attribute(__name__, name, {})
    if name in _MODULE_OF:
        found = getattr(__import__(_MODULE_OF[name], fromlist=[name]), name)  # which may be a module itself
    elif importlib.util.find_spec(f"jaxpar.{name}"):
        found = importlib.import_module(f"jaxpar.{name}")
    else:
        parts = [importlib.import_module(f"jaxpar.{part}") for part in _PARTS]
        inner = {own: f"{part.__name__}.{own}" for part in parts for own in public_names(part)}
        raise no_attribute(__name__, name, inner | {own: f"jaxpar.{own}" for own in __all__})
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
