"""Rotary positions: pairs of a head's numbers are rotated by position / wavelength; wavelengths can be stretched.

Pair i of a head of d numbers has the frequency theta^(-2 i / d). For sequences longer than those of training:

    linear    all frequencies / factor
    dynamic   a theta that grows with the sequence, beyond the original positions
    llama3    high frequencies as they are, low ones / factor, those between interpolated
    yarn      likewise, with bounds in rotations over the original positions, and cos and sin scaled

**Reference**: Su et al. 2021, arXiv 2104.09864; Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071; the
Llama 3.1 model card; transformers 5.23, modeling_rope_utils.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the wavelengths of "rope" are stretched.

    Attributes:
        kind: "linear", "dynamic", "llama3" or "yarn".
        factor: By how much.
        original_positions: The length of the sequences before stretching; "linear" does not use it.
        low_freq_factor: "llama3": frequencies below this many rotations over the original positions are divided by ``factor``.
        high_freq_factor: "llama3": frequencies above this many rotations are unchanged.
        beta_fast: "yarn": frequencies above this many rotations over the original positions are unchanged.
        beta_slow: "yarn": frequencies below this many rotations are divided by ``factor``.
        truncate: "yarn": whether the bounds are rounded to whole pairs.
        attention_factor: "yarn": scales cos and sin.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_positions: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"a rope scaling must be one of {', '.join(KINDS)}; got {self.kind!r}. Choose one of them."
            )
        if self.factor < 1:
            raise ValueError(f"a rope scaling's factor must be 1 or more; got {self.factor}. It stretches wavelengths.")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor; got {self.low_freq_factor} and "
                f"{self.high_freq_factor}. Llama 3.1 has 1 and 4."
            )


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, length: Int[Array, ""] | int
) -> np.ndarray | Array:
    """Returns the frequency of each pair ``[head_dim / 2]``, in radians per position.

    Args:
        head_dim: Width of a head.
        theta: Base of the wavelengths.
        scaling: How they are stretched, if they are.
        length: Positions of the longest sequence; only "dynamic" depends on it.
    """
    exponents = 2 * np.arange(head_dim // 2) / head_dim
    if scaling is not None and scaling.kind == "dynamic":
        return _dynamic_theta(head_dim, theta, scaling, length) ** -exponents
    plain = theta**-exponents
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    rotations = scaling.original_positions * plain / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unchanged = np.clip((rotations - low) / (high - low), 0, 1)
    else:
        unchanged = 1 - _yarn_ramp(head_dim, theta, scaling)
    return plain * unchanged + plain / scaling.factor * (1 - unchanged)


def _dynamic_theta(head_dim: int, theta: float, scaling: RopeScaling, length: Array | int) -> Array | float:
    larger = jnp.maximum if isinstance(length, jax.Array) else max
    longest = larger(length, scaling.original_positions)
    stretch = scaling.factor * longest / scaling.original_positions - (scaling.factor - 1)
    return theta * stretch ** (head_dim / (head_dim - 2))


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns for each pair how far it is from the last unchanged one, 0, to the first fully stretched one, 1."""

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "rows seq"],
    turns: np.ndarray | Array,
    scale: float = 1.0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns ``x`` with each pair (i, i + head_dim / 2) rotated by an angle of position * turns[i], and scaled.

    Args:
        x: Queries or keys.
        positions: The position of each token; one row if all rows have the same.
        turns: The frequency of each pair, as ``frequencies`` returns them.
        scale: Multiplies the result.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[:, :, None].astype(wide) * jnp.asarray(turns, wide)[None, None]
    cos, sin = (scale * turn(angles)[:, :, None] for turn in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
