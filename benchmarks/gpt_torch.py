"""The PyTorch side of gpu_day.py: the same Llama or GPT-2 in plain PyTorch, in a process of its own.

It reads a folder (spec.json, run.json, the initial parameters and the batch as .npy), prints its version, device and number of
parameters as a line of JSON, and then answers each line "N" with a line about N training steps. Weights are float32 and cast
where they are used, attention is ``scaled_dot_product_attention`` restricted to one kernel on a GPU, and AdamW is fused there.
"""

import contextlib
import json
import sys
import time
from pathlib import Path


def make_model(spec: dict, load):
    import numpy as np
    import torch
    from torch.nn import functional

    embed, heads, kv_heads, head_dim = (
        spec["embed_dim"],
        spec["num_heads"],
        spec["kv_heads"],
        spec["head_dim"],
    )
    dtype = getattr(torch, spec["compute_dtype"])
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)

    def param(array):
        return torch.nn.Parameter(torch.from_numpy(array.copy()))

    def by_kind(qkv):
        """Returns all queries, then all keys, then all values, along the second dim."""
        parts = (qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:])
        return np.concatenate([part.reshape(len(qkv), -1) for part in parts], 1)

    def linear(x, weight, bias=None):
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def rotate(x, cos, sin):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
            x.dtype
        )

    class Norm(torch.nn.Module):
        def __init__(self, path, i=None):
            super().__init__()
            self.scale = param(load(f"{path}/scale", i))
            self.shift = param(load(f"{path}/shift", i)) if spec["norm"] == "layer" else None

        def forward(self, x):
            wide = x.float()
            if self.shift is not None:
                return functional.layer_norm(
                    wide, (embed,), self.scale, self.shift, spec["norm_epsilon"]
                ).to(x.dtype)
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec["norm_epsilon"])
            return (wide * self.scale).to(x.dtype)

    class Layer(torch.nn.Module):
        def __init__(self, i):
            super().__init__()
            bias = lambda path: (
                param(load(f"layers/{path}", i).reshape(-1)) if spec["biases"] else None
            )
            self.norm_1, self.norm_2 = (Norm(f"layers/norm_{n}", i) for n in (1, 2))
            # [embed, kv_heads, group and 2, head_dim]: queries, keys, values
            self.w_qkv = param(by_kind(load("layers/attention/w_qkv", i)).T)
            self.b_qkv = (
                param(by_kind(load("layers/attention/b_qkv", i)[None])[0])
                if spec["biases"]
                else None
            )
            self.w_out, self.b_out = (
                param(load("layers/attention/w_out", i).reshape(-1, embed).T),
                bias("attention/b_out"),
            )
            self.w_up, self.b_up = (
                param(load("layers/mlp/w_up", i).reshape(embed, -1).T),
                bias("mlp/b_up"),
            )
            self.w_down, self.b_down = param(load("layers/mlp/w_down", i).T), bias("mlp/b_down")

        def forward(self, h, cos, sin):
            batch, seq = h.shape[:2]
            q, k, v = linear(self.norm_1(h), self.w_qkv, self.b_qkv).split(sizes, dim=-1)
            q, k, v = (part.view(batch, seq, -1, head_dim).transpose(1, 2) for part in (q, k, v))
            if spec["positions"] == "rope":
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
            h = h + linear(mixed.transpose(1, 2).reshape(batch, seq, -1), self.w_out, self.b_out)
            up = linear(self.norm_2(h), self.w_up, self.b_up)
            return h + linear(activated(up), self.w_down, self.b_down)

    def activated(up):
        if spec["mlp"] == "gelu":
            return functional.gelu(up, approximate="tanh")
        gate, up = up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = param(load("outer/tokens"))
            self.head = self.tokens if spec["tied"] else param(load("outer/head").T)
            self.positions = (
                param(load("outer/positions")) if spec["positions"] == "learned" else None
            )
            self.norm = Norm("outer/norm_out")
            self.layers = torch.nn.ModuleList(Layer(i) for i in range(spec["num_layers"]))
            half = head_dim // 2
            frequencies = spec["rope_theta"] ** -(torch.arange(half, dtype=torch.float32) / half)
            angles = torch.arange(spec["seq"], dtype=torch.float32)[:, None] * frequencies[None]
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, tokens, targets):
            h = functional.embedding(tokens, self.tokens)
            if self.positions is not None:
                h = h + self.positions[: spec["seq"]]
            h = h.to(dtype)
            for layer in self.layers:
                h = layer(h, self.cos, self.sin)
            logits = linear(self.norm(h), self.head)[
                ..., : spec["vocab_size"]
            ]  # the other rows of the table are padding
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Transformer()


def main(folder: Path) -> None:
    import numpy as np
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    spec = json.loads((folder / "spec.json").read_text()) | json.loads(
        (folder / "run.json").read_text()
    )
    device = "cuda" if torch.cuda.is_available() and not spec["cpu"] else "cpu"
    arrays = {}

    def load(path, layer=None):
        array = arrays.setdefault(
            path, np.load(folder / f"{path.replace('/', '.')}.npy", mmap_mode="r")
        )
        return np.asarray(array if layer is None else array[layer])

    model = make_model(spec, load).to(device)
    tokens, targets = (
        torch.from_numpy(load(name).copy()).long().to(device) for name in ("tokens", "targets")
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=spec["learning_rate"],
        betas=tuple(spec["betas"]),
        eps=spec["epsilon"],
        weight_decay=spec["weight_decay"],
        fused=device == "cuda",
    )
    forward = torch.compile(model) if spec["torch"] == "compile" else model
    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[
        spec["attention"]
    ]
    flash = lambda: sdpa_kernel(kernel) if device == "cuda" else contextlib.nullcontext()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def steps(count: int) -> list:
        losses = []
        for _ in range(count):
            with flash():
                loss = forward(tokens, targets)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        synchronize()
        return losses

    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": device, "device_kind": kind}
    say(about | {"num_params": sum(p.numel() for p in model.parameters())})
    for line in sys.stdin:
        start = time.perf_counter()
        losses = steps(int(line))
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        say({"seconds": seconds, "losses": [float(loss) for loss in losses], "peak_bytes": peak})


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        print("the PyTorch side of gpu_day.py, which starts it")
