"""Rotary positions: pairs of a head's numbers are rotated by position / wavelength; wavelengths can be stretched.

Pair i of a head of d numbers has the frequency theta^(-2 i / d). For sequences longer than those of training:

    linear    all frequencies / factor
    dynamic   a theta that grows with the length of a token's own row or document, beyond the original positions
    llama3    high frequencies as they are, low ones / factor, those between interpolated
    yarn      likewise, with bounds in rotations over the original positions, and cos and sin scaled

**Reference**: Su et al. 2021, arXiv 2104.09864; Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071; the
Llama 3.1 model card; transformers 5.23, modeling_rope_utils.py.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.fields import check_at_least, check_kind, check_one_of, check_positive

_OWN = {  # the fields of each kind, beside ``factor``
    "linear": (),
    "dynamic": ("original_positions",),
    "llama3": ("original_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
KINDS = tuple(_OWN)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the wavelengths of "rope" are stretched. A field of another kind must have its default.

    Attributes:
        kind: "linear", "dynamic", "llama3" or "yarn".
        factor: By how much.
        original_positions: All but "linear": the length of the sequences before stretching.
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
        check_one_of(KINDS, kind=self.kind)
        check_at_least(1, "It stretches wavelengths.", factor=self.factor)
        check_at_least(
            1,
            "Give the length of the sequences before stretching.",
            original_positions=self.original_positions,
        )
        others = (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        )
        check_positive(
            "Correct it in the rope scaling.", **{name: getattr(self, name) for name in others}
        )
        self._check_own_fields()
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor; got {self.low_freq_factor} and "
                f"{self.high_freq_factor}. Llama 3.1 has 1 and 4."
            )

    def _check_own_fields(self) -> None:
        """Raises for a field that has no effect: the caller expects one, and transformers has no key to write it under."""
        own = ("kind", "factor", *_OWN[self.kind])
        others = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in own
        }
        if wrong := {
            name: value for name, value in others.items() if value != getattr(type(self), name)
        }:
            raise ValueError(
                f"a {self.kind!r} rope scaling must have its own fields alone, {', '.join(own[1:])}; got "
                f"{', '.join(f'{name}={value!r}' for name, value in wrong.items())}. Leave out {', '.join(wrong)}."
            )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The wavelengths of rotary positions.

    Attributes:
        theta: Base of the wavelengths: the longest is nearly 2 pi ``theta`` positions.
        scaling: How they are stretched for longer sequences; None: not at all.
    """

    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_positive("Choose 10_000, say.", theta=self.theta)
        kinds = (RopeScaling, None)
        check_kind(
            kinds,
            "a RopeScaling or None",
            'Write RopeScaling(kind="linear", factor=2.0), say.',
            scaling=self.scaling,
        )


def frequencies(
    head_dim: int, rope: Rope, lengths: Int[Array, "rows seq"] | int
) -> np.ndarray | Float[Array, "rows seq half"]:
    """Returns the frequency of each pair ``[head_dim / 2]``, in radians per position.

    Args:
        head_dim: Width of a head.
        rope: Its wavelengths.
        lengths: The length of the row or document that a token belongs to; only "dynamic" depends on it. If it is an array, the
            result of "dynamic" is ``[rows, seq, head_dim / 2]``.
    """
    theta, scaling = rope.theta, rope.scaling
    exponents = 2 * np.arange(head_dim // 2) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    if scaling.kind == "dynamic":
        return _dynamic(plain, head_dim, scaling, lengths)
    if scaling.kind == "linear":
        return plain / scaling.factor
    rotations = scaling.original_positions * plain / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unchanged = np.clip((rotations - low) / (high - low), 0, 1)
    else:
        unchanged = 1 - _yarn_ramp(head_dim, theta, scaling)
    return plain * unchanged + plain / scaling.factor * (1 - unchanged)


def _dynamic(
    plain: np.ndarray, head_dim: int, scaling: RopeScaling, lengths: Array | int
) -> np.ndarray | Float[Array, "rows seq half"]:
    """Returns frequencies for a larger theta; exactly ``plain`` for lengths up to the original positions."""
    exponents = -2 * np.arange(head_dim // 2) / (head_dim - 2)
    excess = lengths - scaling.original_positions
    if isinstance(lengths, int):
        return (
            plain * (1 + scaling.factor * max(excess, 0) / scaling.original_positions) ** exponents
        )
    stretch = 1 + scaling.factor * jnp.maximum(excess, 0) / scaling.original_positions
    return plain[None, None] * stretch[:, :, None] ** exponents[None, None]


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns for each pair how far it is from the last unchanged one, 0, to the first fully stretched one, 1."""

    def pair_of(rotations: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_positions / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "rows seq"],
    turns: np.ndarray | Float[Array, "_ _ half"],
    scale: float = 1.0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns ``x`` with each pair (i, i + head_dim / 2) rotated by an angle of position * turns[i], and scaled.

    Args:
        x: Queries or keys.
        positions: The position of each token; one row if all rows have the same.
        turns: The frequency of each pair, as ``frequencies`` returns them: for all tokens, or for each.
        scale: Multiplies the result.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    turns = turns[None, None] if turns.ndim == 1 else turns
    angles = positions[:, :, None].astype(wide) * jnp.asarray(turns, wide)
    cos, sin = (scale * turn(angles)[:, :, None] for turn in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
