"""The program that hypothesis varies: operation, shape, dtype, axes, what stands around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import case
from harness.env import D, Env, M

AROUND = ("nothing", "vmap", "scan", "cond", "remat", "jit", "while")


def _surround(how: str, f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The function, applied in a loop, a branch, a batch..., with the same value as the function alone."""
    if how == "vmap":
        return lambda x: jax.vmap(f)(x[None])[0]
    if how == "scan":
        return lambda x: lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1][1]
    if how == "cond":
        return lambda x: lax.cond(True, f, f, x)
    if how == "while":
        return lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(x)), (0, jnp.zeros_like(f(x))))[1]
    return {"remat": jax.checkpoint, "jit": jax.jit, "nothing": lambda f: f}[how](f)


@case("drawn", exact=True)
def program(env: Env) -> Any:
    """A few reductions in a row; rank-unique operands with exact sums."""
    p = env.params
    names = [D] if M not in env.mesh.axis_names else [D, M]
    rng = np.random.default_rng(p["seed"])
    shape = (env.size * (2 if len(names) > 1 else 1), *p["shape"])
    value = rng.integers(0, 2, shape) if p["dtype"] in ("bool", "uint8") else rng.integers(-2, 3, shape)
    x = env.put(value.astype(p["dtype"]), P(tuple(names)))

    def f(x: jax.Array) -> Any:
        out = []
        for step in p["steps"]:
            axes = tuple(step["axes"])
            # hetccl's own functions insist on a spanning axis
            op = getattr(env.api if D in axes else lax, step["op"])
            y = _surround(step["around"], lambda v, op=op, axes=axes: op(v, axes))(x)
            out.append(lax.psum(y, M) if M in names and M not in axes else y)
            if D not in axes:
                out[-1] = env.psum(out[-1], D)
        return out

    return jax.jit(env.smap(f, P(tuple(names)), P()))(x)
