"""The mark of tests that compile for GPUs: they run where CUDA's compiler of the installed JAX is found."""

import importlib.metadata

import jax
import pytest


def has_compiler():
    try:
        return importlib.metadata.version("jax-cuda12-plugin") == jax.__version__
    except importlib.metadata.PackageNotFoundError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="jaxpar[gpu-compile] is not installed: make check-gpu")
