"""What `peers.py` compares: each question's peers and the commands that start them, scripts of `peers/` with arguments."""

from dataclasses import dataclass

Command = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """One table of peers.

    Attributes:
        title: The title of the table.
        mesh: The mesh of its rows.
        peers: Commands by the name of the peer. Ratios are to the first.
    """

    title: str
    mesh: str
    peers: dict[str, Command]


def jax_peer(*args: str) -> Command:
    return "jax_peer.py", *args


def torch_peer(*args: str) -> Command:
    return "torch_peer.py", *args


def jaxpp_peer(*args: str) -> Command:
    return "jaxpp_peer.py", *args


def is_torch(command: Command) -> bool:
    return command[0] == "torch_peer.py"


def is_jaxpp(command: Command) -> bool:
    return command[0] == "jaxpp_peer.py"


def jaxpar_pipeline(*args: str) -> Command:
    return jax_peer("jaxpar", "--stage", "4", *args)


def jaxpar_schedules(*names: str) -> dict[str, Command]:
    return {f"jaxpar {name}": jaxpar_pipeline("--schedule", name) for name in names}


def mpmd_schedules(*names: str) -> dict[str, Command]:
    return {
        f"jaxpar mpmd {name}": jaxpar_pipeline("--executor", "mpmd", "--schedule", name)
        for name in names
    }


def torch_schedules(*names: str) -> dict[str, Command]:
    return {
        f"PyTorch {name}": torch_peer("pipeline", "--size", "4", "--schedule", name)
        for name in names
    }


def jaxpp_schedules(*names: str) -> dict[str, Command]:
    return {f"JaxPP {name}": jaxpp_peer(name) for name in names}


WHOLE = ("--num-microbatches", "1")

QUESTIONS = {
    "one": Question(
        "One device, 8 microbatches",
        "one device",
        {
            "jax.jit": jax_peer("plain"),
            "jaxpar": jax_peer("jaxpar"),
            "PyTorch": torch_peer("single"),
        },
    ),
    "data": Question(
        "Data parallelism, one microbatch",
        "data 2",
        {
            "jax.jit with shardings, DP 2": jax_peer("plain", "--data", "2", *WHOLE),
            "jaxpar, DP 2": jax_peer("jaxpar", "--data", "2", *WHOLE),
            "PyTorch DDP 2": torch_peer("ddp", "--size", "2", *WHOLE),
        },
    ),
    "tensor": Question(
        "Tensor parallelism, one microbatch",
        "tensor 2",
        {
            "jax.jit with shardings, TP 2": jax_peer("plain", "--tensor", "2", *WHOLE),
            "jaxpar, TP 2": jax_peer("jaxpar", "--tensor", "2", *WHOLE),
            "PyTorch, TP 2": torch_peer("tensor", "--size", "2", *WHOLE),
        },
    ),
    "pipeline": Question(
        "Pipelines, 8 microbatches",
        "stage 4",
        {
            "jax.jit, one device": jax_peer("plain"),
            **jaxpar_schedules("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
            "jaxpar 1f1b, unit form": jaxpar_pipeline("--form", "unit"),
            **mpmd_schedules("1f1b", "zb-h1"),
            "GPipe by jax.grad": jax_peer("gpipe", "--stage", "4"),
            "1F1B by one jit a stage": jax_peer("stages", "--stage", "4"),
            **torch_schedules("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
        },
    ),
    "jaxpp": Question(
        "Pipelines beside JaxPP, 8 microbatches",
        "stage 4",
        {
            "jax.jit, one device": jax_peer("plain"),
            **jaxpar_schedules("1f1b", "interleaved", "zb-h1"),
            **mpmd_schedules("1f1b", "interleaved", "zb-h1"),
            **jaxpp_schedules("Std1F1B", "Eager1F1B", "Interleaved1F1B", "ZeroBubble", "DualPipeV"),
        },
    ),
    "mixed": Question(
        "Two and three axes at once",
        "that of each row",
        {
            "jax.jit, one device": jax_peer("plain"),
            "jaxpar data 2, stage 2, tensor 2": jax_peer(
                "jaxpar", "--data", "2", "--stage", "2", "--tensor", "2", "--num-microbatches", "4"
            ),
            "jaxpar data 2, stage 4": jax_peer(
                "jaxpar", "--data", "2", "--stage", "4", "--num-microbatches", "4"
            ),
            "jaxpar stage 4, tensor 2": jax_peer("jaxpar", "--stage", "4", "--tensor", "2"),
        },
    ),
}
