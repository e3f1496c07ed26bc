"""jaxpar trains a pure JAX function on any number of devices: data, pipeline and tensor parallelism over one mesh."""

from typing import TYPE_CHECKING, Any

from jaxpar import _first_line  # noqa: F401, before JAX is imported, to print a line

# isort: split
from jaxpar import adapters, collectives, huggingface, losses, planner, schedule
from jaxpar._near_names import no_attribute, public_names
from jaxpar.backward.min_cut_remat import min_cut_remat
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
from jaxpar.train import TrainState, abstract_state, init_state, make_train_step

if TYPE_CHECKING:
    from jaxpar.checkpoint import CheckpointManager

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

_PARTS = (huggingface, planner, collectives, schedule, losses)  # whose names are looked for too, the last one first


def __getattr__(name: str) -> Any:
    if name == "CheckpointManager":  # Orbax takes longer to import than the rest, and many programs save nothing
        from jaxpar.checkpoint import CheckpointManager

        return CheckpointManager
    places = {
        inner: f"jaxpar.{part.__name__.partition('.')[2]}.{inner}" for part in _PARTS for inner in public_names(part)
    }
    raise no_attribute(__name__, name, places | {own: f"jaxpar.{own}" for own in __all__})
