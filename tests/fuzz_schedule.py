"""Random tables of ops that a user could have written."""

import random

from jaxpar.schedule import Op, Schedule


def random_schedule(seed, num_stages, num_microbatches, num_chunks, placement, *, splits, recomputes):
    """A table in which each stage idles or runs some of the ops that it can, in any order of microbatches."""
    rng = random.Random(seed)
    kinds = ["F", *["R"] * recomputes, "B", *["W"] * splits]
    left = [
        [Op(kind, m, chunk) for kind in kinds for m in range(num_microbatches) for chunk in range(num_chunks)]
        for _ in range(num_stages)
    ]
    # What an op needs follows from the kinds alone, so all ops are put in one tick for now.
    shape = Schedule("random", num_stages, num_microbatches, num_chunks, (tuple(map(tuple, left)),), placement)
    done, ticks = set(), []
    while any(left):
        tick = tuple(tuple(some_ops(rng, shape, stage, own, done)) for stage, own in enumerate(left))
        for stage, ops in enumerate(tick):
            left[stage] = [op for op in left[stage] if op not in ops]
            done |= {(stage, op) for op in ops}
        ticks.append(tick)
    return Schedule("random", num_stages, num_microbatches, num_chunks, tuple(filter(any, ticks)), placement)


def some_ops(rng, shape, stage, left, done):
    """At most one F, one R and one B of those that can run now, and any number of W; in a V not F and B, which go one way."""
    here, chosen = set(done), []
    for kind in "FRBW" if shape.placement == "loop" else rng.choice(["FRW", "RBW"]):
        for _ in range(rng.choice([0, 1, 1]) if kind != "W" else rng.choice([0, 1, 2])):
            ready = [
                op
                for op in left
                if op.kind == kind and op not in chosen and here.issuperset(shape.inputs_of(stage, op))
            ]
            if ready:
                chosen.append(rng.choice(ready))
                here.add((stage, chosen[-1]))
    return chosen
