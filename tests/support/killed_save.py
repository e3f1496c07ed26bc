"""Saves step 1, then step 2 with an audit hook of Python that kills the process where a phase begins.

python tests/support/killed_save.py FOLDER PHASE
"""

import os
import signal
import sys

import jax

jax.config.update("jax_platforms", "cpu")

import jaxpar  # noqa: E402
from tests.support.tiny_state import at_step, make_state  # noqa: E402

UNFINISHED = "saving-2.orbax-checkpoint-tmp"
# What begins a phase: the event, the end of its path, and for files the mode. Those before "the step is named" leave step 1.
PHASES = {
    "a folder is made": ("os.mkdir", UNFINISHED, None),
    "a folder is made for the arrays": ("os.mkdir", f"{UNFINISHED}/state", None),
    "shards are described": ("open", f"{UNFINISHED}/state/array_metadatas/process_0", "w"),
    "the tree is described": ("open", f"{UNFINISHED}/state/_METADATA", "w"),
    "the save is described": ("open", f"{UNFINISHED}/_CHECKPOINT_METADATA", "w"),
    "Orbax commits": ("open", f"{UNFINISHED}/commit_success.txt", "w"),
    "Orbax names its folder": ("os.rename", UNFINISHED, None),
    "files are hashed": ("open", "saving-2/state/manifest.ocdbt", "r"),
    "the manifest is written": ("open", "saving-2/manifest.json.part", "w"),
    "the manifest is named": ("os.rename", "saving-2/manifest.json.part", None),
    "the step is named": ("os.rename", "saving-2", None),
    "the old step is put away": ("os.rename", "checkpoints/1", None),
    "the old step is deleted": ("shutil.rmtree", "saving-1.gone", None),
}
COMMITTED = ("the old step is put away", "the old step is deleted")


def main(folder, phase):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(folder, mesh, keep=1)
    manager.save(at_step(make_state(mesh, seed=1), 1))
    event, path, mode = PHASES[phase]

    def kill(name, args):
        if name == event and str(args[0]).endswith(path) and mode in (None, args[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    manager.save(at_step(make_state(mesh, seed=2), 2))


if __name__ == "__main__":
    main(*sys.argv[1:])
