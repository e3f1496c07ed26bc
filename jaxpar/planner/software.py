"""What the training software does, where it differs from jaxpar: to compare a plan with what others report.

    price(model, machines, choice, batch_size=1536, executor="mpmd", software=Software(name="Megatron-LM", ...))

Memory and traffic remain those of jaxpar's step; only times differ, and a plan says of which software they are.
"""

from dataclasses import dataclass

from jaxpar.mesh import DATA, STAGE, TENSOR

AXES = (DATA, STAGE, TENSOR)


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a program runs what a ``Choice`` leaves open.

    Attributes:
        name: For display.
        sequence_parallel: Whether activations between pairs of column and row splits are sharded over ``tensor`` (Korthikanti
            et al. 2022, arXiv 2205.05198).
        overlaps: The mesh axes whose collectives run beside computation, as far as there is enough of it.
        gradient_bytes: Bytes of each number of a gradient that is reduced over replicas; None: as jaxpar accumulates them.
        param_bytes: Bytes of each number of a param that is gathered from replicas; None: as jaxpar stores them.
        splits_messages: Whether each device of ``tensor`` sends its share of a message between stages, which is then gathered.
        blocks_on_messages: Whether a stage computes nothing while it sends a message to another.
        exchanges_in_pairs: Whether in the interleaved schedule a stage sends after each pair of F and B and waits until the
            messages of both are exchanged, as Megatron-LM does unless it is told to overlap them.
        message_seconds: Seconds of a message between stages besides those of its bytes and the latency of the link.
        waits_between_steps: Whether stages wait for one another between steps, as jaxpar's do for the norm of the gradients.
            Otherwise each begins the next step when it is done itself, and rolls an update back if the global norm requires it
            (post-validation, Qi et al. 2023, arXiv 2401.10241, section 4).
        fused: Whether chains of elementwise operations run as one kernel, as by XLA; otherwise each is a kernel of its own.
        fused_softmax: Whether attention without a fused kernel keeps its scores in 16 bits and has a kernel for scale, mask and
            softmax together.
        fused_accumulation: Whether the products that compute gradients of weights add to those of earlier microbatches.
        products_alone_in_w: Whether W, where a schedule has it, computes matrix products alone and B the rest, since what W
            reads is stored. In jaxpar W recomputes elementwise operations.
        recompute: The share of a layer's forward products that is recomputed besides what ``Choice.remat`` says.
        product_rate: Rate of products with weights over that in 16 bits, 2 for FP8 on a GPU that has it.
    """

    name: str = "jaxpar"
    sequence_parallel: bool = False
    overlaps: tuple[str, ...] = ()
    gradient_bytes: int | None = None
    param_bytes: int | None = None
    splits_messages: bool = False
    blocks_on_messages: bool = False
    exchanges_in_pairs: bool = False
    message_seconds: float = 0.0
    waits_between_steps: bool = True
    fused: bool = True
    fused_softmax: bool = False
    fused_accumulation: bool = False
    products_alone_in_w: bool = False
    recompute: float = 0.0
    product_rate: float = 1.0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.overlaps) - set(AXES)):
            raise ValueError(f"overlaps must be mesh axes, {', '.join(AXES)}; got {unknown}. Leave them out.")
        for field in ("gradient_bytes", "param_bytes"):
            if getattr(self, field) not in (None, 1, 2, 4, 8):
                raise ValueError(
                    f"{field} must be 1, 2, 4 or 8; got {getattr(self, field)!r}. Choose 2 for 16-bit numbers."
                )
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute must be a share, 0 to 1; got {self.recompute}. Choose 0.")
        if self.message_seconds < 0:
            raise ValueError(f"message_seconds must be 0 or more; got {self.message_seconds}. Choose 0.")
        if self.product_rate <= 0:
            raise ValueError(f"product_rate must be positive; got {self.product_rate}. Choose 1 for 16-bit products.")


JAXPAR = Software()
