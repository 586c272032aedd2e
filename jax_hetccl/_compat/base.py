"""What all files here share."""

from __future__ import annotations

from typing import Any

import jax

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def as_tuple(x: Any) -> tuple[Any, ...]:
    """An axis name or a sequence of them, as a tuple."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)
