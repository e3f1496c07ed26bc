"""Writes a run's states one after another, beside its training: each is whole in the end or given up by all processes.

What a disk does never raises here. It is said, kept in ``failures``, and the next save starts anew.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jax import process_index, tree
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.folder import Folder, Keep
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.save import clear_the_way, commit
from jaxpar.runtime.coordination import exchange

ANY_SECONDS = 1e6


class Saver:
    """Writes states into the folder of a run's checkpoints.

    Args:
        folder: Of the checkpoints.
        keep: Which stay, once a newer one is committed.
        seconds: What a save may take, until it is given up; 0: any time.
        say: Where messages go.

    Attributes:
        num_saved: Steps that it has committed.
        is_behind: Whether the newest state that was to be saved could not be.
        failures: What could not be saved, and why.
    """

    def __init__(self, folder: Folder, keep: Keep, seconds: float, say: Callable[[str], None]) -> None:
        self._folder, self._keep, self._seconds, self._say = folder, keep, seconds or ANY_SECONDS, say
        self.num_saved, self.is_behind = 0, False
        self.failures: list[str] = []
        self._damaged: set[int] = set()  # steps that a restore passed over
        self._went_on_from: int | None = None
        self._saved: set[int] = set()  # since the last restore
        self._newest: int | None = None  # that this manager saved, or found saved
        self._in_flight: tuple[int, Future[None]] | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxpar-save")

    # -- a save --------------------------------------------------------------------------------------------------------

    def start(self, state: PyTree, manifest: Manifest) -> None:
        """Begins to write a state, and returns once its arrays are copied; every process must call it.

        Args:
            state: In canonical order.
            manifest: Of it, without its files.
        """
        self.wait()
        if self._is_there(manifest):
            self._newest = self._went_on_from = manifest.step
            return
        if not self._is_ready(state, manifest.step):
            return
        written = self._begin_to_write(state, manifest.step)
        self._in_flight = manifest.step, self._background.submit(self._finish, written, manifest)

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the step is saved already: by this manager, or with the same values."""
        step, found = manifest.step, self._folder.look(manifest.step)
        if step in self._damaged or isinstance(found, str):
            is_there = False
        else:
            is_there = step in self._saved or found.arrays == manifest.arrays
        return exchange("is there", is_there)[0]  # as the first process sees it

    def _is_ready(self, state: PyTree, step: int) -> bool:
        """Whether the folder can take the state; the first process looks, and fails the save for all where it cannot."""
        problem, discarded = None, []
        if process_index() == 0:
            try:
                discarded = clear_the_way(self._folder, step, sum(leaf.nbytes for leaf in tree.leaves(state)))
            except OSError as error:
                problem = str(error)
        for name in discarded:
            self._say(f"discarded {name}: an unfinished save, which is no checkpoint")
        problem = exchange("is ready", problem)[0]
        if problem is not None:
            self._fail(step, problem)
        return problem is None

    def _begin_to_write(self, state: PyTree, step: int) -> Callable[[], None]:
        """Returns what waits until this process's arrays are written, and raises where they cannot be."""
        try:
            return orbax_tree.save_async(self._folder.saving(step), state, self._seconds)
        except Exception as error:  # it is told to the other processes, which have begun
            failed = error

        def fail() -> None:
            raise failed

        return fail

    def _finish(self, written: Callable[[], None], manifest: Manifest) -> None:
        """Runs beside the training."""
        problem = commit(self._folder, written, manifest, self._make_count, self._seconds)
        if problem is not None:
            self._fail(manifest.step, problem)
            return
        self._damaged.discard(manifest.step)
        self._saved.add(manifest.step)
        self._newest = manifest.step
        self._went_on_from = None
        self.is_behind = False
        self.num_saved += 1
        if process_index() == 0:
            self._prune(manifest.step)

    def _make_count(self, manifest: Manifest) -> None:
        """Makes a save whose arrays are all there a committed step; runs on the first process alone.

        What it raises fails the save on all processes, and leaves the folder as it was until steps are set aside.
        """
        self._folder.seal(manifest)
        self._folder.check()
        self._set_others_aside(manifest.step)
        self._folder.commit(manifest.step)

    def _set_others_aside(self, step: int) -> None:
        """Takes steps out of the way that are not of the branch which is saved now, so that a restart goes on from it."""
        for other in self._folder.numbered():
            is_committed = isinstance(self._folder.look(other), Manifest)
            is_left = other >= step or (self._went_on_from is not None and other > self._went_on_from)
            if other in self._damaged or (other == step and not is_committed):
                self._folder.set_aside(other, "bad")
            elif is_left and is_committed:
                path = self._folder.set_aside(other, "abandoned")
                self._say(
                    f"set aside step {other} as {path.name}: the run went on from an older step, and saves step {step} now. "
                    "Delete it if it is not wanted."
                )

    def _prune(self, newest: int) -> None:
        try:
            self._folder.prune(self._keep, newest=newest, damaged=self._damaged)
        except OSError as error:
            self._say(f"old checkpoints could not be deleted: {error}")

    def _fail(self, step: int, problem: str) -> None:
        self.failures.append(f"step {step}: {problem}")
        self.is_behind = True
        self._say(
            f"NOT SAVED: checkpoint of step {step}: {problem}. Training goes on; the steps saved before are whole."
        )
        if process_index() == 0:
            self._folder.discard_unfinished()

    # -- around it -----------------------------------------------------------------------------------------------------

    def pass_over(self, step: int, problem: str) -> None:
        """Notes that a restore found a step damaged, and says so: it may be saved again."""
        self._damaged.add(step)
        self._say(f"NOT USED: checkpoint of step {step}: {problem}")

    def go_on_from(self, step: int) -> None:
        """Notes that a restore gave a step; the first save after it sets later steps aside, since the run left their branch."""
        self._saved.clear()
        if not self.num_saved:  # a run that looks back at an older step while it trains leaves no branch
            self._went_on_from = step

    def lost(self) -> int | None:
        """Returns the step that was saved last where the first process finds it no more; every process must call it."""
        is_lost = self._newest is not None and isinstance(self._folder.look(self._newest), str)
        return self._newest if exchange("lost", is_lost)[0] else None

    def wait(self) -> None:
        """Returns once no save is on its way.

        Raises:
            PeerLostError: Another process is gone.
        """
        if self._in_flight is None:
            return
        try:
            self._in_flight[1].result()
        finally:
            self._in_flight = None

    @property
    def saving(self) -> int | None:
        """The step whose save is on its way; None where there is none."""
        in_flight = self._in_flight  # another thread may ask
        return None if in_flight is None or in_flight[1].done() else in_flight[0]

    def close(self) -> None:
        """Returns once no save is on its way, and takes no more."""
        self.wait()
        self._background.shutdown()
