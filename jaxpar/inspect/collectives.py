"""Every collective of a compiled program: its mesh axes, its runs in a step, and the bytes that each device sends.

Bytes moved are those of the ring algorithms, for one device and one run, with n bytes of payload and N devices in a group:

    all-reduce          2 (N-1)/N n    n: the array that is reduced
    reduce-scatter        (N-1)/N n    n: the input array
    all-gather            (N-1)/N n    n: the output array
    all-to-all            (N-1)/N n    n: the input array; ragged: its complete buffer, an upper bound
    collective-permute            n    n: the array that a device sends
    collective-broadcast          n    n: the array that is broadcast

A group of one device moves nothing and is left out. The bytes are those of the program as compiled: for CPU devices XLA
widens bfloat16, but not float16, to float32 before every collective, so use float16 to measure two-byte traffic on CPU.

Sums over devices do not show what one line carries, such as that of a server: `link_bytes` has the bytes on each link between
two devices. A permutation lists its pairs. The other collectives are counted as ring algorithms, which NCCL and XLA use: each
member of a group sends its bytes to the next one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxpar.inspect import groups as device_groups
from jaxpar.inspect import hlo
from jaxpar.inspect.hlo import Computation, Instruction, Module, Shape, plain_number

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program, with all its runs in a step.

    Attributes:
        kind: XLA's name of it: one of `KINDS`.
        axes: the mesh axes over which it runs, in the mesh's order; empty where no mesh is known.
        whole_axes: False if its groups cover only a part of those axes, or are irregular.
        times: runs in a step on each device, with loop trips; None in a loop whose trips the compiler does not know.
        known_times: the runs if each unknown loop makes one trip; the same as `times` where no loop is unknown.
        conditional: whether it is in a branch of a conditional.
        is_bound: whether `times` is an upper bound, because it is not known how often its branch is taken.
        payload_bytes: n of the table above, of all its arrays together.
        bytes_per_run: bytes that a device sends in one run; the most of any device.
        group_size: devices in a group; 2, a sender and a receiver, in a permutation.
        shapes: the input arrays; more than one where XLA combined several collectives.
        shift: of a permutation along one axis, the distance by which it shifts; else None.
        senders: of a permutation, the devices that send, by their indices in the mesh; None: all.
        crosses_nodes: whether a group spans nodes; None if the nodes are not known.
        asynchronous: whether it has a start and a done, so that computation may overlap with it.
        groups: the groups or pairs as text of the program.
        name: the instruction's name in the program.
    """

    kind: str
    axes: tuple[str, ...]
    whole_axes: bool
    times: int | float | None
    known_times: int | float
    conditional: bool
    is_bound: bool
    payload_bytes: int
    bytes_per_run: int
    group_size: int
    shapes: tuple[Shape, ...]
    shift: int | None
    senders: tuple[int, ...] | None
    crosses_nodes: bool | None
    asynchronous: bool
    groups: str
    op_name: str
    source: str
    name: str = ""

    @property
    def bytes_moved(self) -> int | None:
        """Bytes that each sending device sends in a step; None where `times` is None."""
        return None if self.times is None else round(self.times * self.bytes_per_run)


def find_collectives(
    module: Module,
    *,
    axis_sizes: device_groups.AxisSizes = (),
    node_of: Sequence[int] | None = None,
    assumptions: hlo.Assumptions = hlo.NO_ASSUMPTIONS,
) -> tuple[Collective, ...]:
    """Returns the collectives that the program runs, in program order, with an entry for each call that reaches one."""
    # The computation inside an asynchronous collective is that collective. Programs have many fusions, of which those that
    # the compiler makes by itself never communicate.
    is_plain_fusion = lambda each: each.opcode == "fusion" and each.attribute("kind") != "kCustom"
    enters = lambda instruction, call: (
        _kind(instruction) is None and not is_plain_fusion(instruction)
    )
    found = (
        _read(module, computation, instruction, run, axis_sizes, node_of)
        for run, computation, instruction in hlo.runs(module, assumptions, enters)
        if _kind(instruction)
    )
    return tuple(each for each in found if each is not None)


def bytes_of_busiest(collectives: Iterable[Collective]) -> int:
    """Returns the bytes that the busiest device sends in a step in all of these together."""
    by_all, by_some = 0, Counter()
    for each in collectives:
        if each.senders is None:
            by_all += each.bytes_moved or 0
        else:
            by_some.update(dict.fromkeys(each.senders, each.bytes_moved or 0))
    return by_all + max(by_some.values(), default=0)


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Returns the bytes that each device sends in one run of a ring algorithm: the table of this module."""
    if kind in ("collective-permute", "collective-broadcast"):
        return payload_bytes
    passes = 2 if kind == "all-reduce" else 1
    return round(Fraction(passes * payload_bytes * (group_size - 1), group_size))


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.base_opcode
    if opcode == "send" and "_xla_send_recv_source_target_pairs" in instruction.attributes:
        return "collective-permute"  # GPU compilers split a permutation into send and recv, which are one transfer
    return opcode if opcode in KINDS else None


def _read(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    run: hlo.Run,
    axis_sizes: device_groups.AxisSizes,
    node_of: Sequence[int] | None,
) -> Collective | None:
    kind = _kind(instruction)
    assert kind is not None
    text, are_pairs = device_groups.groups_text(instruction.attributes)
    groups = device_groups.parse_groups(text, module.num_devices)
    if are_pairs:
        groups = tuple(pair for pair in groups if pair[0] != pair[1])
    group_size = max((len(group) for group in groups), default=1)
    if group_size == 1:
        return None
    axes, whole, shift = (), True, None
    if axis_sizes and are_pairs:
        axes, shift = (
            device_groups.axes_of_pairs(groups, axis_sizes),
            device_groups.shift_of_pairs(groups, axis_sizes),
        )
    elif axis_sizes:
        axes, whole = device_groups.axes_of_groups(groups, axis_sizes)
    shapes = _payload(kind, computation, instruction)
    payload = sum(shape.num_bytes for shape in shapes) * (group_size if kind == "all-gather" else 1)
    times = plain_number(run.times)
    return Collective(
        kind=kind,
        axes=axes,
        whole_axes=whole,
        times=None if run.unknown else times,
        known_times=times,
        conditional=run.conditional,
        is_bound=run.is_bound,
        payload_bytes=payload,
        bytes_per_run=ring_bytes(kind, payload, group_size),
        group_size=group_size,
        shapes=shapes,
        shift=shift,
        senders=tuple(pair[0] for pair in groups) if are_pairs else None,
        crosses_nodes=None if node_of is None else device_groups.crosses_nodes(groups, node_of),
        asynchronous=run.asynchronous or instruction.opcode != kind,
        groups=text,
        op_name=instruction.op_name,
        source=module.source(instruction),
        name=instruction.name,
    )


def _payload(kind: str, computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    operands = computation.operand_shapes(instruction)
    if (
        instruction.opcode == "send"
        or kind == "ragged-all-to-all"
        or instruction.attribute("slice_sizes")
    ):
        operands = operands[:1]  # the other operands are tokens, buffers, offsets and sizes
    return tuple(shape for shapes in operands for shape in shapes)


Link = tuple[int, int]


def link_bytes(collectives: Iterable[Collective], num_devices: int) -> dict[Link, int]:
    """Returns the bytes that one device sends to another in a step, by (sender, receiver), for pairs that communicate.

    Args:
        collectives: The collectives of a ``StepReport``.
        num_devices: Devices of the program.
    """
    links: Counter[Link] = Counter()
    for each in collectives:
        groups = device_groups.parse_groups(each.groups, num_devices)
        if each.senders is None:
            pairs = [
                pair for group in groups for pair in zip((group[-1], *group), group, strict=False)
            ]
        else:
            pairs = [(sender, receiver) for sender, receiver in groups]
        links.update({pair: each.bytes_moved or 0 for pair in pairs if pair[0] != pair[1]})
    return dict(links)


def line_bytes(links: Mapping[Link, int]) -> dict[int, int]:
    """Returns the bytes in a step through each device's own line to the network, in and out together."""
    lines: Counter[int] = Counter()
    for (sender, receiver), num_bytes in links.items():
        lines[sender] += num_bytes
        lines[receiver] += num_bytes
    return dict(lines)
