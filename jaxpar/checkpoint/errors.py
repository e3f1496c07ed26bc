"""What can be wrong with a state or with what was saved of one."""


class BadCheckpointError(RuntimeError):
    """What was saved is damaged or foreign; a run ends with exit code 65 rather than begin anew in silence."""


class DivergedError(RuntimeError):
    """Devices that should hold the same values do not; such a state is not saved."""


class NotFiniteError(RuntimeError):
    """Parameters are NaN or infinite; such a state is not saved."""
