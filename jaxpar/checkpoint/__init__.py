"""All of saving and restoring a run: whole, verified, on any mesh. Orbax writes the arrays; `orbax_tree.py` alone knows it.

    runs/gpt/checkpoints/
        200/  300/  400/            a folder a saved step
            manifest.json           written last: arrays, files with their SHA-256, step, samples, config, mesh, versions
            state/                  every array in pieces, each written by the process that holds it
        saving-500/                 a save on its way
        350.abandoned/  360.bad/    set aside: of a branch that the run left, and damaged

A checkpoint holds the whole TrainState, its layers in the model's order, and says nothing about devices, so that a run goes
on wherever its arrays fit: on another mesh, with another schedule, on more processes, on one device. Which rows the next step
takes follows from the seed and the step (`jaxpar.data.batches`), so both are saved with these. A step counts once its manifest
is there, and is used once every file has the SHA-256, and every array the checksum, that the manifest says.
"""

from jaxpar.checkpoint.errors import BadCheckpointError, DivergedError, NotFiniteError
from jaxpar.checkpoint.export import export_orbax, export_safetensors
from jaxpar.checkpoint.folder import Keep, has_steps
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.checkpoint.manifest import Manifest

__all__ = [
    "BadCheckpointError",
    "CheckpointManager",
    "DivergedError",
    "Keep",
    "Manifest",
    "NotFiniteError",
    "export_orbax",
    "export_safetensors",
    "has_steps",
]
