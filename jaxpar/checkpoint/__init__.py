"""Saves and restores the complete state of a run, verified, on any mesh. Orbax writes the arrays (`orbax_tree.py`).

    runs/gpt/checkpoints/
        200/  300/  400/            one folder per saved step
            manifest.json           written last: arrays, files with their SHA-256, step, samples, config, mesh, versions
            state/                  every array in shards, each written by a process that holds it
        saving-500/                 a save in progress
        350.abandoned/  360.bad/    set aside: a step of a branch that the run left, a damaged step

A checkpoint holds the complete TrainState with its layers in canonical order, and nothing about devices, so a run can resume
wherever its arrays fit: on another mesh, with another schedule, on more processes, on one device. The rows of the next step
follow from the seed and the step (`jaxpar.data.batches`), which are saved too. A step is committed if it has a manifest, and is
restored only if every file has the SHA-256, and every array the checksum, that the manifest records.

Read in this order: `folder.py` and `manifest.py` (what is on disk), `state.py` (what of a state), `checksums.py` (of values,
and whether replicas agree), `manager.py` (the entry point), `save.py`, `restore.py` with `array_file.py` (one array on disk),
`stored_params.py` (params alone, for export and serving), and for other programs `export.py`. Only `orbax_tree.py` uses Orbax.
"""

from jaxpar.checkpoint.export import export_orbax, export_safetensors
from jaxpar.checkpoint.folder import Keep, delete_steps, has_steps
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.restore import BadCheckpointError
from jaxpar.checkpoint.save import DivergedError, NotFiniteError

__all__ = [
    "BadCheckpointError",
    "CheckpointManager",
    "DivergedError",
    "Keep",
    "Manifest",
    "NotFiniteError",
    "delete_steps",
    "export_orbax",
    "export_safetensors",
    "has_steps",
]
