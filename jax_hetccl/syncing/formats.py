"""Narrow formats in which values cross between clusters, and the arithmetic that every cluster repeats bit for bit.

A float of a block of values that share a power of two as their scale is that of the OCP Microscaling Formats (MX)
specification 1.0; blocks are larger here, whole rows as in the block-wise quantisation of Dettmers et al. 2021 (arXiv
2110.02861). Why powers of two: what a cluster receives is then an exact float32, so that it does not matter whether a
compiler fuses the product with the scale into an addition.

Everything here gives the same bits on all platforms. Two things would not: subnormal results, which CPUs flush to zero
(so everybody does), and division, which compilers for GPUs may approximate (so :func:`reciprocal` corrects it).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hetccl._errors import ConfigError

BLOCK = 64  # a block is a row, or as many trailing dimensions as have so many elements
_NOT_FINITE = -128  # the exponent of a block with a value that is not finite
_INFINITE = 0x7F800000
_SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of one or two bytes for an element.

    Attributes:
      name: the dtype, as users name it.
      limit: the largest element; ``None`` for a format with float32's range, which needs no scale.
      least: the smallest exponent of a scale, so that no decoded value is subnormal.
    """

    name: str
    limit: float | None = None
    least: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What :meth:`encode` makes of an array."""
        return ("",) if self.limit is None else ("", "exponents")

    def encode(self, x: jax.Array) -> list[jax.Array]:
        """``x`` (float32) as arrays to send: the elements, and the exponents of the blocks' scales if it has any."""
        if self.limit is None:
            return [lax.convert_element_type(x, jnp.bfloat16)]
        exponents = self._exponents(x)
        scaled = x * _power(-exponents)
        scaled = jnp.where(exponents == _NOT_FINITE, 0, scaled)
        if self.name == "int8":
            elements = lax.convert_element_type(lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN), np.int8)
        else:  # as bytes: not every vendor's library moves floats of 8 bits
            elements = lax.bitcast_convert_type(lax.convert_element_type(scaled, jnp.dtype(self.name)), np.uint8)
        return [elements, lax.convert_element_type(exponents, np.int8)]

    def decode(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """What :meth:`encode` made, as float32: exact, and the same bits everywhere. NaN where not all was finite."""
        elements = arrays[0]
        if self.limit is None:
            return normal(lax.convert_element_type(elements, np.float32))
        if self.name != "int8":
            elements = lax.bitcast_convert_type(elements, jnp.dtype(self.name))
        exponents = lax.convert_element_type(arrays[1], np.int32)
        scale = jnp.where(exponents == _NOT_FINITE, np.float32(np.nan), _power(exponents))
        return lax.convert_element_type(elements, np.float32) * scale

    def _exponents(self, x: jax.Array) -> jax.Array:
        """Of each block, the exponent of the smallest scale with which its elements stay within the limit: int32, with
        dimensions of size 1 for those of the block. Made of integers, whose maximum is the same however it is taken and
        does not lose a NaN."""
        assert self.limit is not None
        largest = jnp.max(_bits(x) & 0x7FFFFFFF, axis=_block(x.shape), keepdims=True, initial=0)
        limit = int(np.float32(self.limit).view(np.int32))
        exponent = (largest >> 23) - (limit >> 23)
        exponent += lax.convert_element_type((largest & 0x7FFFFF) > (limit & 0x7FFFFF), np.int32)
        return jnp.where(largest >= _INFINITE, _NOT_FINITE, jnp.maximum(exponent, self.least))


FORMATS = {
    f.name: f for f in (Format("bfloat16"), Format("float8_e4m3fn", 448.0, -126 + 9), Format("int8", 127.0, -126))
}


def format_of(wire_dtype: Any) -> Format:
    """The format that a user names: a dtype, a scalar type or a string.

    Raises:
      ConfigError: there is no such format; lists those that there are.
    """
    try:
        return FORMATS[jnp.dtype(wire_dtype).name]
    except (KeyError, TypeError):
        raise ConfigError(f"wire_dtype={wire_dtype!r}; it is one of {', '.join(FORMATS)}, or None") from None


def mean(values: Sequence[jax.Array], weights: Sequence[jax.Array] | None) -> jax.Array:
    """The mean of the clusters' float32 values, in their order; ``values`` are products with the weights if there are any."""
    if weights is None:
        by: Any = np.float32(1 / len(values))
    else:
        by = reciprocal(functools.reduce(lax.add, weights))
    total = functools.reduce(lambda some, one: normal(some + one), values)  # two of bfloat16 may leave a subnormal one
    return normal(total * by)


def normal(x: jax.Array) -> jax.Array:
    """``x`` (float32) with zero for subnormal values."""
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, np.float32(0), x)


def reciprocal(x: jax.Array) -> jax.Array:
    """``1 / x`` of a float32 scalar, rounded to nearest: the same bits everywhere.

    The platform's division need only be within two units in the last place; integers put that right. Outside of 2**-126 to
    2**100 it is what the platform says.
    """
    bits = _bits(x) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, (bits & 0x7FFFFF) | 0x800000
    # 2**47 / mantissa is between 2**23 and 2**24, where floats are integers.
    quotient = lax.convert_element_type(np.float32(2**47) / lax.convert_element_type(mantissa, np.float32), np.int32)
    quotient = nearest(quotient, mantissa)
    inside = (exponent > 0) & (exponent < 227)
    exact = lax.convert_element_type(quotient, np.float32) * _power(jnp.where(inside, 103 - exponent, 0))
    return jnp.where(inside, jnp.where(x < 0, -exact, exact), 1 / x)


def nearest(quotient: jax.Array, mantissa: jax.Array) -> jax.Array:
    """``2**47 / mantissa`` rounded to nearest, given an integer at most two away from it: all int32."""
    rest = -(quotient * mantissa)  # 2**47 less the product, modulo 2**32, which is all that there is of it
    for k in (1, 3):
        quotient += lax.convert_element_type(2 * rest >= k * mantissa, np.int32)
        quotient -= lax.convert_element_type(2 * rest < -k * mantissa, np.int32)
    return quotient


def _block(shape: Sequence[int]) -> tuple[int, ...]:
    """The trailing dimensions that make up a block."""
    first = len(shape)
    while first > 0 and (first == len(shape) or math.prod(shape[first:]) < BLOCK):
        first -= 1
    return tuple(range(first, len(shape)))


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.int32)


def _power(exponents: jax.Array) -> jax.Array:
    """2 to the power of exponents between -126 and 127."""
    return lax.bitcast_convert_type((exponents + 127) << 23, np.float32)
