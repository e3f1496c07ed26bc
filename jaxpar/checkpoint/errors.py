"""The errors of saving and restoring a state."""


class BadCheckpointError(RuntimeError):
    """The checkpoint is damaged or foreign; a run ends with exit code 65 rather than silently start from the beginning."""


class DivergedError(RuntimeError):
    """Devices that should hold the same values do not; such a state is not saved."""


class NotFiniteError(RuntimeError):
    """Parameters are NaN or infinite; such a state is not saved."""
