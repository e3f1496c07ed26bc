"""All of saving and restoring a run. Orbax does the work; no other file knows it.

    runs/gpt/checkpoints/
        200/  300/  400/        one folder a saved step, the newest `keep` of them: every array in pieces, each written by the
                                process that holds it, and as JSON the run's config and the mesh it ran on

A checkpoint holds the whole TrainState and says nothing about devices, so that a run goes on wherever its arrays fit: on
another mesh, on more processes, on one device. Which rows the next step takes follows from the seed and the step
(`jaxpar.batches`), so both are saved with these.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from jaxpar.mesh import check_mesh
from jaxpar.sharding import fetch, path_string
from jaxpar.train import TrainState


class CheckpointManager:
    """Saves a run's states into a folder, keeps the newest, and restores them on any mesh.

    Args:
        directory: The folder of one run's checkpoints, which every process can reach. Made at the first save.
        mesh: The mesh that the run is on now.
        keep: How many checkpoints stay; older ones are deleted after a save.
    """

    def __init__(self, directory: Path | str, mesh: Mesh, *, keep: int = 3) -> None:
        check_mesh(mesh)
        if keep < 1:
            raise ValueError(f"keep must be at least 1; got {keep}. Give the number of checkpoints that stay.")
        self.directory, self.mesh, self._keep = Path(directory).absolute(), mesh, keep

    def save(self, state: TrainState, *, config: Mapping[str, Any] | None = None) -> int:
        """Writes ``state`` under its step, and returns the step once the checkpoint is whole; every process must call it.

        A checkpoint appears whole or not at all. One that has this step already stays, and nothing is written.

        Args:
            state: Any TrainState.
            config: What the run's numbers depend on, as JSON values: a restore that gives another one is refused.
        """
        step = int(fetch(state.step))
        if step not in self.steps():
            about = {"config": None if config is None else _json(config), "mesh": dict(self.mesh.shape)}
            self._checkpointer.save(step, state, force=True, custom_metadata=about)
        return step

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that can be restored, in order."""
        if not self.directory.is_dir():  # Orbax would make it
            return ()
        return tuple(sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints))

    def latest(self) -> int | None:
        """Returns the newest step that can be restored; None where there is none."""
        return max(self.steps(), default=None)

    def restore(
        self, target: TrainState, *, step: int | None = None, config: Mapping[str, Any] | None = None
    ) -> TrainState:
        """Returns a saved state, each array with its shape, dtype and sharding in ``target``; every process must call it.

        Args:
            target: A state like the saved one: arrays (which are only looked at), or ShapeDtypeStructs with shardings.
            step: Of the checkpoint; by default the newest.
            config: As given to ``save``. By default any config is taken.

        Raises:
            FileNotFoundError: There is no checkpoint.
            TypeError: A leaf of the target has no sharding.
            ValueError: There is no such step, or the checkpoint is of another config or model, or the target of another mesh.
        """
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(
                f"restoring needs a checkpoint; got none in {self.directory}. Name the folder that a run saved to."
            )
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(
                f"restoring needs a saved step; got step={step}, saved {', '.join(map(str, steps))}. Choose one of these."
            )
        abstract = jax.tree_util.tree_map_with_path(self._abstract, target)
        saved, where = self._checkpointer.metadata(step), f"step {step} in {self.directory}"
        about: Any = saved.custom_metadata or {}
        _check_config(config, about.get("config"), where)
        _check_arrays(_described(saved.metadata), _described(abstract), where)
        return self._checkpointer.load(step, abstract)

    def _abstract(self, path: tuple, leaf: PyTree) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"every leaf of a restore's target must have a NamedSharding; got {type(sharding).__name__} for "
                f"{path_string(path)}. Take a state from jaxpar.init_state, or ShapeDtypeStructs with sharding=."
            )
        if sharding.mesh != self.mesh:
            raise ValueError(
                f"a restore's target must lie on the manager's mesh, {dict(self.mesh.shape)}; got "
                f"{dict(sharding.mesh.shape)} for {path_string(path)}. Make both with one mesh."
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    @cached_property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        # Any: Orbax's policies do not fit the protocols that it types them with.
        never: Any = ocp.training.save_decision_policies.SpecificStepsPolicy(())  # by itself: save() forces each
        newest: Any = ocp.training.preservation_policies.LatestN(self._keep)
        return ocp.training.Checkpointer(
            str(self.directory),
            save_decision_policy=never,
            preservation_policy=newest,
            cleanup_tmp_directories=True,  # what a killed save left
        )


def _json(config: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(config), default=str))


def _check_config(config: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, where: str) -> None:
    if config is None or saved is None:
        return
    now = _json(config)
    names = [name for name in {**saved, **now} if now.get(name) != saved.get(name)]
    if names:
        got = ", ".join(f"{name}={now.get(name)!r} (saved: {saved.get(name)!r})" for name in names)
        raise ValueError(
            f"a run must go on with the config that it was saved with; got {got} for {where}. "
            "Give the saved values, or begin a run in another folder."
        )


def _described(tree: PyTree) -> dict[str, str]:
    """Returns the shape and dtype of each leaf by its path, which is the same for a saved tree and a state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_arrays(saved: dict[str, str], wanted: dict[str, str], where: str) -> None:
    for path in {**wanted, **saved}:
        if saved.get(path) != wanted.get(path):
            raise ValueError(
                "a checkpoint must hold the arrays of the target, with their shapes and dtypes; got "
                f"{wanted.get(path, 'none')} for {path}, saved {saved.get(path, 'none')}, in {where}. "
                "Use the model and optimizer that it was saved with."
            )
