"""The settings that a caller of ``plan`` fixes: whether they are settings, and whether a mesh of the cluster can have them.

plan("gpt2", cluster, data=8, num_chunks=2)    refused: a mesh of 8 devices with data=8 has no stages
"""

from typing import Any

from jaxpar.data_parallel import check_sequences
from jaxpar.fields import arg, check_at_least
from jaxpar.mesh import AXES, DATA, TENSOR, abstract_mesh
from jaxpar.planner.job import divisors
from jaxpar.planner.model_shape import ModelShape
from jaxpar.planner.plans import SETTINGS
from jaxpar.planner.search import Estimator
from jaxpar.schedule import NAMED, SCHEDULES


def check_fixed(
    fixed: dict[str, Any],
    executor: str,
    batch_size: int,
    top: int,
    shape: ModelShape,
    num_devices: int,
) -> None:
    """Raises for an unknown setting, a value out of its range, or one that the model or the devices cannot have."""
    if unknown := sorted(set(fixed) - set(SETTINGS)):
        raise ValueError(f"a fixed setting must be one of {', '.join(SETTINGS)}; got {unknown}.")
    if executor not in ("spmd", "mpmd"):
        raise ValueError(f'{arg("executor")} must be "spmd" or "mpmd"; got {executor!r}.')
    counts: dict[str, Any] = {
        name: fixed.get(name) for name in (*AXES, "num_chunks", "num_microbatches")
    }
    check_at_least(1, batch_size=batch_size, top=top, **counts)
    wholes = {"zero": 0, "context": 1, "experts": TENSOR}
    cut = [name for name, whole in wholes.items() if fixed.get(name) not in (None, whole)]
    if executor == "mpmd" and (fixed.get("stage") or 1) > 1 and cut:
        raise ValueError(
            f"with {arg(executor=executor)} replicas hold all params and whole sequences; got {arg(stage=fixed['stage'])}, "
            f"{arg(**{cut[0]: fixed[cut[0]]})}. Leave {arg(cut[0])} out, or use {arg(executor='spmd')}."
        )
    for name, values, rule in (
        ("experts", (TENSOR, DATA), 'be over "tensor" or "data"; got {!r}.'),
        ("zero", range(4), "be a ZeRO level, 0 to 3; got {!r}. Choose 0 for none."),
        ("schedule", SCHEDULES, f"be one of {', '.join(SCHEDULES)}; got {{!r}}."),
    ):
        if fixed.get(name) is not None and fixed[name] not in values:
            raise ValueError(f"{arg(name)} must {rule.format(fixed[name])}")
    _check_pipeline(fixed)
    if fixed.get("experts") is not None and shape.experts is None:
        raise ValueError(
            f"{arg('experts')} is for a model with experts; got {arg(experts=fixed['experts'])} and {shape.name}. Leave it out."
        )
    context = fixed.get("context") or 1
    if num_devices % context:
        known = [n for n in divisors(num_devices) if n == 1 or not shape.tokens_per_row % (2 * n)]
        raise ValueError(
            f"{arg('context')} must divide the devices; got {arg(context=context)} and {num_devices} devices. Choose it from "
            f"{', '.join(map(str, known))}."
        )
    on = abstract_mesh(context=context)
    check_sequences(shape.row, on, sequences=shape.sequences)


def _check_pipeline(fixed: dict[str, Any]) -> None:
    """Raises ValueError if settings of a pipeline are fixed that no plan has: without a pipeline, or beside one another."""
    schedule, chunks = fixed.get("schedule"), fixed.get("num_chunks") or 1
    given = {"schedule": schedule} if schedule else {"num_chunks": chunks} if chunks > 1 else {}
    if fixed.get("stage") == 1 and given:
        raise ValueError(
            f"one stage is no pipeline, and has no schedule and no chunks; got {arg(stage=1)}, {arg(**given)}. Leave one out."
        )
    named = NAMED.get(schedule or "")
    if named is None or named.takes_any_chunks:
        return
    usual = named.num_chunks
    if fixed.get("num_chunks") not in (None, usual):
        raise ValueError(
            f"stages have {usual} {'chunk' if usual == 1 else 'chunks'} with {arg(schedule=schedule)}; got "
            f"{arg(num_chunks=chunks)}. Leave it out, or choose {arg(schedule='interleaved')}."
        )


def check_has_effect(estimator: Estimator, fixed: dict[str, Any]) -> None:
    """Raises ValueError if settings of a pipeline are fixed, and no mesh with the other settings has stages."""
    names = [name for name in ("schedule", "num_chunks") if fixed.get(name) not in (None, 1)]
    if not names or any(choice.stage > 1 for choice in estimator.candidates(fixed)):
        return
    given = {name: value for name, value in fixed.items() if value is not None}
    raise ValueError(
        f"{' and '.join(map(arg, names))} must be of a mesh with stages, each with a layer for each of its chunks; got "
        f"{arg(**given)}, with which no mesh of {estimator.cluster.num_devices} devices has stages of the "
        f"{estimator.shape.num_layers} layers of {estimator.shape.name}. Leave {' and '.join(map(arg, names))} out."
    )
