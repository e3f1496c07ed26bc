"""PyTorch's grouped product, which gpu_day.py starts: the seconds of its forward pass in bfloat16 for each case, as JSON."""

import json
import sys
import time

ROUNDS = 20


def seconds_of(rows: int, experts: int, depth: int, width: int) -> float:
    """Returns the seconds of a call; experts have equally many rows."""
    import torch

    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, weights = make(rows, depth), make(experts, depth, width)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    run = lambda: torch._grouped_mm(x, weights, offs=ends)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / ROUNDS


if __name__ == "__main__":
    print(json.dumps({name: seconds_of(*sizes) for name, sizes in json.loads(sys.argv[1]).items()}))
