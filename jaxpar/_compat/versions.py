"""Faults of the installed version of JAX and XLA, and the names of its flags."""

import jax

_VERSION = jax.__version_info__

# A sum of an array without elements inside a partly manual shard_map ends the process, on CPU at
# least; seen with JAX 0.11.2.
EMPTY_ARRAYS_CRASH = _VERSION >= (0, 11)

# A conditional copies the arrays that it returns, on GPUs; seen with JAX 0.10.2.
COND_COPIES_ON_GPU = _VERSION < (0, 11)

# Of XLA for GPUs: in a loop it gathers for the next trip while one computes.
PIPELINED_ALL_GATHER: dict[str, bool | str]
if _VERSION < (0, 11):
    PIPELINED_ALL_GATHER = {"xla_gpu_enable_pipelined_all_gather": True}
else:
    PIPELINED_ALL_GATHER = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}

# XLA for GPUs runs a kernel twice whose result is both written into a stack and read; seen with
# JAX 0.11.2.
EACH_KERNEL_ONCE: tuple[str, ...] = ()
if (0, 11) <= _VERSION < (0, 12):
    EACH_KERNEL_ONCE = ("--xla_gpu_enable_dynamic_slice_fusion=false",)
