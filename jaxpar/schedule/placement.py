"""Which stage and chunk holds which virtual stage: four virtual stages on two stages, in both placements.

loop    stage 0: 0 2    stage 1: 1 3
v       stage 0: 0 3    stage 1: 1 2
"""

PLACEMENTS = ("loop", "v")


def stage_and_chunk(virtual_stage: int, num_stages: int, placement: str) -> tuple[int, int]:
    """Returns the (stage, chunk) that holds a virtual stage in a placement, as ``Schedule`` defines them."""
    chunk, stage = divmod(virtual_stage, num_stages)
    runs_back = placement == "v" and chunk % 2 == 1
    return (num_stages - 1 - stage if runs_back else stage), chunk


def check_placement(placement: str) -> None:
    """Raises ValueError unless there is such a placement."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}; got {placement!r}.")
