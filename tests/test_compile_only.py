"""Devices for the compiler alone: which there are, what is refused, and what is said where the compiler for them is missing."""

import importlib.metadata
import os

import jax
import pytest

import jaxpar
from jaxpar.compile_only import TARGETS, check_cudnn, set_compiler_flags, target_text
from jaxpar.gpus import GPUS
from jaxpar.planner.cluster import cluster


def test_every_gpu_of_the_planner_can_be_compiled_for():
    assert set(TARGETS) == {name.removesuffix("-jeanzay") for name in GPUS}


@pytest.mark.parametrize("gpu", TARGETS)
def test_a_target_is_the_gpu_of_the_datasheet(gpu):
    target, sheet = GPUS[gpu].target, cluster(gpu)
    assert 0.95 < target["bandwidth"] / sheet.memory_bandwidth < 1.01
    assert target["block_bytes"] == target["shared_bytes"] - 1024
    assert gpu.split("-")[0].upper() in GPUS[gpu].driver_name
    text = target_text(GPUS[gpu])
    assert f" device_memory_size: {sheet.memory_bytes}\n" in text, (
        "a plan and the compiler know one size"
    )
    assert f'"{GPUS[gpu].driver_name}"' in text
    assert text.count("{") == text.count("}")


def test_bad_input_is_named():
    with pytest.raises(
        ValueError, match=r"gpu must be one of a100-40gb, .*; got 'h800'. Choose the nearest one."
    ):
        jaxpar.compile_only_devices("h800")
    with pytest.raises(ValueError, match="num_nodes must be an integer of 1 or more; got 0"):
        jaxpar.compile_only_devices("h100", num_nodes=0)
    with pytest.raises(
        ValueError, match=r"devices_per_node must be an integer of 1 or more; got 2\.5"
    ):
        jaxpar.compile_only_devices("h100", devices_per_node=2.5)


@pytest.mark.parametrize(
    ("installed", "got"),
    [({}, "none"), ({"jax-cuda12-plugin": "0.4.1"}, "jax-cuda12-plugin 0.4.1")],
)
def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch, installed, got):
    def version(package):
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    remedy = (
        rf"{jax.__version__}; got {got}. Install it: pip install -e '\.\[gpu-compile\]' in the clone of jaxpar, or "
        rf"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}\."
    )
    with pytest.raises(ImportError, match=remedy):
        jaxpar.compile_only_devices("h100")


def test_a_missing_cudnn_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("jaxpar.compile_only.CUDNN", ("no-such-package",))
    with pytest.raises(
        ImportError,
        match=r"needs cuDNN; got none. Install nvidia-cudnn-cu12, or choose dtype=float32",
    ):
        check_cudnn()
    monkeypatch.setattr("jaxpar.compile_only.CUDNN", ("no-such-package", "jax"))
    check_cudnn()


def test_flags_that_come_too_late_for_xla_are_said(monkeypatch):
    assert jax.device_count(), "JAX has started"
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.warns(UserWarning, match="so those for GPUs are not in force"):
        set_compiler_flags()
    assert "--xla_gpu_autotune_level=0" in os.environ["XLA_FLAGS"]
    set_compiler_flags()  # they are set: nothing to say
