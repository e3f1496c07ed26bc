"""The public names of jaxpar, each with the module that it is imported from when it is first used (``__init__.py``)."""

from jaxpar import adapters as adapters
from jaxpar import collectives as collectives
from jaxpar import fp8 as fp8
from jaxpar import huggingface as huggingface
from jaxpar import losses as losses
from jaxpar import planner as planner
from jaxpar import schedule as schedule
from jaxpar.backward.remat import min_cut_remat as min_cut_remat
from jaxpar.checkpoint import CheckpointManager as CheckpointManager
from jaxpar.compile_only import compile_only_devices as compile_only_devices
from jaxpar.data import batches as batches
from jaxpar.data_parallel import abstract_batch as abstract_batch
from jaxpar.data_parallel import local_rows as local_rows
from jaxpar.data_parallel import shard_batch as shard_batch
from jaxpar.gradients import value_and_grad as value_and_grad
from jaxpar.inspect import inspect_step as inspect_step
from jaxpar.layered_model import LayeredModel as LayeredModel
from jaxpar.layered_model import PackedLayers as PackedLayers
from jaxpar.mesh import make_mesh as make_mesh
from jaxpar.params import ParamSpec as ParamSpec
from jaxpar.pipeline import LayerLayout as LayerLayout
from jaxpar.planner import plan as plan
from jaxpar.row_dependence import row_wise as row_wise
from jaxpar.runtime.distributed import initialize as initialize
from jaxpar.runtime.distributed import leave as leave
from jaxpar.runtime.distributed import use_fake_devices as use_fake_devices
from jaxpar.sharding import fetch as fetch
from jaxpar.sharding import replicated as replicated
from jaxpar.sharding import shard as shard
from jaxpar.sharding import shardings_from_dims as shardings_from_dims
from jaxpar.sharding import shardings_from_paths as shardings_from_paths
from jaxpar.step.settings import Parallel as Parallel
from jaxpar.step.settings import Pipeline as Pipeline
from jaxpar.step.split_check import check_split as check_split
from jaxpar.tensor_parallel import column_parallel as column_parallel
from jaxpar.tensor_parallel import flash_attention as flash_attention
from jaxpar.tensor_parallel import row_parallel as row_parallel
from jaxpar.tensor_parallel import sequence_parallel as sequence_parallel
from jaxpar.tensor_parallel import vocab_parallel as vocab_parallel
from jaxpar.train import TrainState as TrainState
from jaxpar.train import abstract_state as abstract_state
from jaxpar.train import init_state as init_state
from jaxpar.train import make_eval_step as make_eval_step
from jaxpar.train import make_train_step as make_train_step

__version__: str
