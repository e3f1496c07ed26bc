"""Which devices a run trains on: it says so first, and does not run on the CPU of a machine with a GPU unless it is told to."""

import subprocess
import sys

import jax
import pytest

from jaxpar import devices
from jaxpar.commands.doctor import advice
from jaxpar.devices import DeviceError, describe_devices, started_devices, unused_gpus
from jaxpar.mesh import make_mesh
from jaxpar.run import BasicFlags, Run
from tests.support.waiting import WAIT_SECONDS

NODES = ["/dev/nvidia0", "/dev/nvidia1"]
NOT_VISIBLE = "INTERNAL: no supported devices found for platform CUDA."


@pytest.fixture
def broken(monkeypatch):
    """A machine with GPUs whose JAX was told nothing and runs on the CPU; returns a function that sets JAX's reason."""
    monkeypatch.setattr(devices, "gpu_nodes", lambda: NODES)
    monkeypatch.setattr(devices, "cpu_is_asked_for", lambda environment: False)
    monkeypatch.setattr(devices, "backend_errors", dict)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    def because(error=None, **versions):
        known = {name.replace("_", "-"): version for name, version in versions.items()} | {
            "jaxlib": "0.10.2"
        }
        monkeypatch.setattr(devices, "version_of", known.get)
        monkeypatch.setattr(
            devices, "backend_errors", lambda: {} if error is None else {"cuda": error}
        )

    return because


def test_a_gpu_without_a_plugin_is_not_replaced_by_the_cpu(broken):
    broken()
    with pytest.raises(
        DeviceError,
        match=r"got a GPU, /dev/nvidia0, /dev/nvidia1, and JAX on the cpu: its CUDA plugin is not",
    ):
        make_mesh(data=2)
    with pytest.raises(
        DeviceError,
        match=r"pip install 'jax\[cuda13\]'.*, or set JAX_PLATFORMS=cpu to run on the CPU\.$",
    ):
        started_devices()


def test_a_variable_that_hides_the_gpu_is_named_and_not_a_package(broken, monkeypatch):
    broken(NOT_VISIBLE, jax_cuda13_plugin="0.10.2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    why, remedy = unused_gpus(
        "cpu", NODES, {"CUDA_VISIBLE_DEVICES": "9", "LD_LIBRARY_PATH": "/usr/lib"}
    )
    assert why == NOT_VISIBLE[:-1], "JAX's own reason"
    assert remedy == "Unset CUDA_VISIBLE_DEVICES, which is '9', or name GPUs that nvidia-smi lists"
    found = advice({"CUDA_VISIBLE_DEVICES": "9", "PJRT_NPROC": "16"}, "cpu", 1)
    assert (
        found == []
    )  # doctor reads the machine by a name of its own, which this test does not replace
    monkeypatch.setattr("jaxpar.commands.doctor.gpu_nodes", lambda: NODES)
    found = advice({"CUDA_VISIBLE_DEVICES": "9", "PJRT_NPROC": "16"}, "cpu", 1)
    assert found == [f"there is a GPU, but JAX runs on the CPU: {why}", f"{remedy}."]


def test_other_libraries_of_cuda_are_named(broken):
    broken("Unable to load cuDNN. Is it installed?", jax_cuda12_plugin="0.10.2")
    why, remedy = unused_gpus("cpu", NODES, {"LD_LIBRARY_PATH": "/usr/local/cuda-11/lib64"})
    assert why == "Unable to load cuDNN. Is it installed?"
    assert remedy.startswith("Unset LD_LIBRARY_PATH, which is '/usr/local/cuda-11/lib64'")
    broken(None, jax_cuda12_plugin="0.9.0")
    why, remedy = unused_gpus("cpu", NODES, {})
    assert (
        why
        == "jax-cuda12-plugin 0.9.0 did not start beside jaxlib 0.10.2, as JAX's lines above say"
    )
    assert remedy == "See whether nvidia-smi works, then python -m jaxpar doctor"


def test_the_cpu_is_used_where_it_is_asked_for(monkeypatch):
    assert devices.cpu_is_asked_for({}), "the tests ask for fake devices"
    assert unused_gpus("cpu", NODES, {}) is None
    assert unused_gpus("gpu", NODES, {}) is None
    values = dict(jax.config.values) | {"jax_num_cpu_devices": -1, "jax_platforms": None}
    monkeypatch.setattr(type(jax.config), "values", property(lambda self: values))
    assert not devices.cpu_is_asked_for({})
    assert devices.cpu_is_asked_for({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    values["jax_platforms"] = "cpu"
    assert devices.cpu_is_asked_for({})


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda'"),
            "Unable to initialize backend 'cuda'",
        ),
        (AssertionError(), "no plugin of JAX for JAX_PLATFORMS=cuda"),  # of JAX, without its plugin
    ],
)
def test_a_platform_that_cannot_start_is_an_error_with_a_remedy(monkeypatch, error, why):
    def refuse():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(devices.jax, "devices", refuse)
    with pytest.raises(DeviceError, match=f"got: {why}.*set JAX_PLATFORMS=cpu"):
        make_mesh(data=2)


def test_a_run_says_its_devices_first_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpar.run.messages._named", [])
    for name in ("a", "b"):
        said = []
        with Run(BasicFlags.of(out_dir=tmp_path / name), make_mesh(data=-1), say=said.append):
            pass
        assert said == ["devices: 8 fake CPU devices"]


def test_devices_are_described_by_kind(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(devices.jax, "devices", lambda: [Device()] * 16)
    monkeypatch.setattr(devices.jax, "process_count", lambda: 2)
    assert describe_devices() == "16 NVIDIA H100 80GB HBM3, in 2 processes"
    Device.platform = "cpu"
    monkeypatch.setattr(devices.jax, "devices", lambda: [Device()])
    monkeypatch.setattr(devices.jax, "process_count", lambda: 1)
    assert describe_devices() == "1 CPU"


def test_a_mesh_that_leaves_devices_idle_says_so(caplog):
    make_mesh(data=4)
    assert caplog.messages == [
        "the mesh has 4 of 8 devices, the others are idle; data=-1 takes all of them"
    ]
    caplog.clear()
    make_mesh(data=-1)
    make_mesh()  # one device, whose numbers those of fake devices are compared with
    assert caplog.messages == []


SCRIPT = """
from jaxpar import devices
devices.gpu_nodes = lambda: ["/dev/nvidia0"]
from jaxpar.commands import recipe
import sys
sys.path.insert(0, "recipes")
import house_prices
recipe.run(house_prices.main, house_prices.Config)
"""


@pytest.mark.full
def test_a_recipe_stops_before_it_trains_on_the_cpu_of_a_machine_with_a_gpu(tmp_path, monkeypatch):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", SCRIPT, "--out-dir", str(tmp_path / "run"), "--steps", "2"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: JAX must use the GPU of a machine that has one" in ended.stderr
    assert not (tmp_path / "run").exists()
    ended = subprocess.run(
        [*command, "--fake-devices", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("devices: 2 fake CPU devices\n")
