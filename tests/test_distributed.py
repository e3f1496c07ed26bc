"""Joining a run: what initialize does alone, and the XLA flags of GPUs."""

import importlib.util
import os

import jax
import pytest

import jaxpar
from jaxpar.runtime import distributed


def test_initialize_joins_nothing_where_nothing_speaks_of_other_processes(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    assert jaxpar.initialize() is False
    assert jax.process_count() == 1


def test_a_part_of_a_place_is_refused():
    with pytest.raises(ValueError, match="and no JAX_COORDINATOR_ADDRESS and no JAX_PROCESS_ID"):
        jaxpar.initialize(num_processes=2)


def test_a_time_out_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(distributed.TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ValueError, match="JAXPAR_INITIALIZATION_TIMEOUT must be a number of seconds; got 'soon'"):
        jaxpar.initialize(coordinator_address="127.0.0.1:1", num_processes=1, process_id=0)


def test_overlap_is_asked_for_unless_the_user_has_said_otherwise():
    overlap, *others = distributed.GPU_FLAGS
    assert distributed.with_gpu_flags("--xla_a=1").split() == ["--xla_a=1", overlap, *others]
    off = overlap.replace("true", "false")
    assert distributed.with_gpu_flags(off).split() == [off, *others]


def test_flags_of_gpus_are_left_alone_on_cpus(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    before = os.environ.get("XLA_FLAGS")
    distributed.set_gpu_flags()
    assert os.environ.get("XLA_FLAGS") == before
