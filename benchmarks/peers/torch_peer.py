"""One way to train the small GPT in PyTorch on CPU: alone, DDP, tensor parallel, or a pipeline; gloo between processes.

    python benchmarks/peers/torch_peer.py pipeline --size 4 --schedule 1F1B

The process that is asked starts the others, and they do what it does, step by step.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import numpy as np
import protocol
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (what every PyTorch user writes)
from torch import nn

STOP, STEP, CPU = 0, 1, 2  # what the first process asks of the others


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument(
        "--schedule", default="1F1B", choices=("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    )
    parser.add_argument("--num-microbatches", type=int, default=protocol.NUM_MICROBATCHES)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.size == 1:
        protocol.serve(PEERS[args.peer](args), versions=f"torch {torch.__version__}")
        return
    rank = int(os.environ.get("RANK", "0"))
    others = start_others(args.size) if rank == 0 else []
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["RENDEZVOUS"], args.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.size)
    step = PEERS[args.peer](args)
    if rank == 0:
        asking = lambda what, run: lambda: (ask(what), run())[1]
        versions = f"torch {torch.__version__}"
        protocol.serve(asking(STEP, step), versions=versions, cpu_seconds=asking(CPU, cpu_of_all))
        ask(STOP)
    else:
        while (what := ask()) != STOP:
            step() if what == STEP else cpu_of_all()
    dist.destroy_process_group()
    for other in others:
        other.wait()


def start_others(size: int) -> list[subprocess.Popen]:
    os.environ["RENDEZVOUS"] = os.path.join(tempfile.mkdtemp(), "store")
    run = lambda rank: subprocess.Popen(
        [sys.executable, *sys.argv],
        env={**os.environ, "RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=2,
    )
    return [run(rank) for rank in range(1, size)]


def ask(what: int = STOP) -> int:
    """Sends the request of the first process to all."""
    wish = torch.tensor(what)
    dist.broadcast(wish, 0)
    return int(wish)


def cpu_of_all() -> float:
    seconds = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds)


class Block(nn.Module):
    """Pre-LayerNorm attention and MLP."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.head_dim = embed // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.q, self.k, self.v, self.out = (nn.Linear(embed, embed) for _ in range(4))
        self.up, self.down = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Part(nn.Module):
    """Some layers of the model, with the embedding before the first and the head after the last."""

    def __init__(self, shape, params: dict, layers: range) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == shape.layers
        outer, tensor = (
            params["outer"],
            lambda array: nn.Parameter(torch.tensor(np.ascontiguousarray(array))),
        )
        self.blocks = nn.ModuleList(Block(shape.embed, shape.heads) for _ in layers)
        for block, number in zip(self.blocks, layers, strict=True):
            fill(block, {name: leaf[number] for name, leaf in params["layers"].items()})
        if self.first:
            self.tokens, self.positions = tensor(outer["tokens"]), tensor(outer["positions"])
        if self.last:
            self.norm, self.head = nn.LayerNorm(shape.embed), tensor(outer["w_head"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens[x] + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head if self.last else x


def fill(block: Block, layer: dict) -> None:
    """Copies the first values of benchmarks/small_gpt.py; biases and norms begin as PyTorch's zeros and ones."""
    embed = layer["w_up"].shape[0]
    qkv = layer["w_qkv"].reshape(embed, 3, embed)
    maps = {
        block.q: qkv[:, 0],
        block.k: qkv[:, 1],
        block.v: qkv[:, 2],
        block.out: layer["w_out"].reshape(embed, embed),
    }
    with torch.no_grad():
        for linear, weight in (
            maps | {block.up: layer["w_up"], block.down: layer["w_down"]}
        ).items():
            linear.weight.copy_(torch.tensor(np.ascontiguousarray(weight.T)))
            linear.bias.zero_()


def load(args: argparse.Namespace) -> tuple:
    import small_gpt

    shape = small_gpt.Shape(**small_gpt.SMOKE) if args.smoke else small_gpt.Shape()
    batch = small_gpt.make_batch(shape)
    return (
        shape,
        small_gpt.make_params(shape),
        *(torch.tensor(batch[name]).long() for name in ("tokens", "targets")),
    )


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def descender(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), protocol.LEARNING_RATE)


def single(args: argparse.Namespace) -> Callable[[], float]:
    """One process, gradients added up over microbatches."""
    shape, params, tokens, targets = load(args)
    return accumulating(
        Part(shape, params, range(shape.layers)), tokens, targets, args.num_microbatches
    )


def accumulating(model: nn.Module, tokens, targets, num_microbatches: int) -> Callable[[], float]:
    optimizer = descender(model)
    parts = list(zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in parts:
            loss = mean_loss(model(part), wanted) / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def data_parallel(args: argparse.Namespace) -> Callable[[], float]:
    """DistributedDataParallel: each process its rows."""
    shape, params, tokens, targets = load(args)
    own = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(Part(shape, params, range(shape.layers)))
    of_own = accumulating(
        model, tokens.chunk(args.size)[own], targets.chunk(args.size)[own], args.num_microbatches
    )

    def step() -> float:
        loss = torch.tensor(of_own())
        dist.all_reduce(loss)
        return float(loss) / args.size

    return step


def tensor_parallel(args: argparse.Namespace) -> Callable[[], float]:
    """PyTorch's own column and row parallel layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape, params, tokens, targets = load(args)
    model, mesh = Part(shape, params, range(shape.layers)), init_device_mesh("cpu", (args.size,))
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, columns | dict.fromkeys(("out", "down"), RowwiseParallel()))
    return accumulating(model, tokens, targets, args.num_microbatches)


def pipeline(args: argparse.Namespace) -> Callable[[], float]:
    """torch.distributed.pipelining."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    shape, params, tokens, targets = load(args)
    rank, size = dist.get_rank(), args.size
    chunks = 2 if args.schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    back = args.schedule == "ZBVZeroBubble"
    numbers = [
        rank + c * size if c == 0 or not back else 2 * size - 1 - rank for c in range(chunks)
    ]
    each = shape.layers // (size * chunks)
    parts = [Part(shape, params, range(n * each, (n + 1) * each)) for n in numbers]
    stages = [
        pipelining.PipelineStage(part, n, size * chunks, torch.device("cpu"))
        for part, n in zip(parts, numbers, strict=True)
    ]
    make = getattr(schedules, f"Schedule{args.schedule}")
    schedule = make(stages if chunks > 1 else stages[0], args.num_microbatches, loss_fn=mean_loss)
    optimizers, last = [descender(part) for part in parts], size * chunks - 1

    def step() -> float:
        losses: list[torch.Tensor] = []
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = (tokens,) if 0 in numbers else ()
        schedule.step(*inputs, **({"target": targets, "losses": losses} if last in numbers else {}))
        for optimizer in optimizers:
            optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.tensor(0.0)
        dist.all_reduce(loss)
        return float(loss)

    return step


PEERS = {"single": single, "ddp": data_parallel, "tensor": tensor_parallel, "pipeline": pipeline}

if __name__ == "__main__":
    main()
