"""Batched collectives: vmap inside and outside of the region, with named axes, with spmd_axis_name.

The behaviour is what JAX's tests check: shard_map_test.py (vmap of regions, spmd_axis_name, reused names, systematic
vmap), pmap_test.py (collectives over mapped and vmapped axes together, gathers and transposes under vmap along every
axis, vmap of pmap) and batching_test.py (associative collectives over several names, in every order).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, LINEAR, PRIMITIVES, each, on_ranks, op, table, values
from harness.case import BOTH, DATA_MODEL, OFF, ON, Program, case
from harness.env import D, Env, M

_REDUCTIONS = KINDS[:4]


def _op(env: Env) -> Any:
    return op(env, env.params["op"])


_INOUT = {"0->0": (0, 0), "1->1": (1, 1), "2->0": (2, 0), "-1->-1": (-1, -1)}
# Stock JAX does not batch a scatter that drops a dimension in front of the batch's.
_STOCK_FAILS = ("psum_scatter 1->1",)
_INSIDE = {
    f"{k} {io}": {"op": k, "io": io} for k in KINDS for io in _INOUT if k in PRIMITIVES or io in ("0->0", "1->1")
}


@case("conform", table={n: {**row, "rejects": BOTH if n in _STOCK_FAILS else ()} for n, row in _INSIDE.items()})
def inside(env: Env) -> Any:
    """vmap along every dimension, to every dimension."""
    shape = [2 * env.size, 3]
    source, to = _INOUT[env.params["io"]]
    shape.insert(source if source >= 0 else 2, 4)
    return each(env, jax.vmap(_op(env), source, to), *shape)


@case("turn", table=table(PRIMITIVES))
def nested(env: Env) -> Any:
    """Two levels, with one operand that only one of them maps."""

    def f(x: jax.Array) -> Any:
        scale = jnp.arange(1.0, 4.0)
        return jax.vmap(lambda s: jax.vmap(lambda v: _op(env)(v * s), 1, 1)(x))(scale)

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def not_batched(env: Env) -> Any:
    """A collective of a value that the map does not touch, in a mapped function."""
    return each(env, lambda x: jax.vmap(lambda s: s + jnp.sum(_op(env)(x)))(jnp.arange(3.0)), 2 * env.size, 2)


@case("turn", table=table(KINDS))
def outside(env: Env) -> Any:
    """vmap of the whole region."""
    x = env.put(
        np.asarray(np.random.default_rng(0).integers(-4, 4, (3, env.size, 2 * env.size, 2)), np.float32), P(None, D)
    )
    return Program(jax.vmap(on_ranks(env, _op(env))), (x,))


@case("conform")
def outside_with_reused_name(env: Env) -> Any:
    """The name of a vmapped axis outside may be the mesh's."""
    x = env.put(np.arange(3.0 * env.size * 4, dtype=np.float32).reshape(3, env.size, 4), P(None, D))
    return Program(jax.vmap(on_ranks(env, lambda x: x * 2), axis_name=D), (x,))


@case("conform", table=table(_REDUCTIONS, rejects=ON))
def two_axes(env: Env) -> Any:
    """Reductions over a vmapped axis and the spanning one, in both orders; with types, stock JAX refuses them."""
    reduction = getattr(lax, env.params["op"])
    f = jax.vmap(lambda v: (reduction(v, (D, "v")), reduction(v, ("v", D))), axis_name="v")
    return each(env, f, 3, 2)


# With types stock JAX has no reduction over a vmapped axis alone.
@case("turn", vma=OFF, table=table(KINDS))
def beside_a_named_axis(env: Env) -> Any:
    """A reduction over the vmapped axis, then the collective over the spanning one."""
    f = jax.vmap(lambda v: op(env, env.params["op"])(v + lax.pmax(v, "v") * lax.axis_index("v")), axis_name="v")
    return each(env, f, 3, 2 * env.size)


@case("turn", vma=OFF, table=table(PRIMITIVES))
def the_other_way_round(env: Env) -> Any:
    """The collective over the vmapped axis, beside a sum over the spanning one."""
    n = 4
    f = jax.vmap(lambda v: op(env, env.params["op"], "v", n)(v * lax.psum(v, D)), axis_name="v")
    return each(env, f, n, 2 * n)


@case("conform", rejects=ON)
def named_axis_with_types(env: Env) -> Any:
    """The simplest of these, in both modes."""
    return each(env, jax.vmap(lambda v: v - lax.pmax(v, "v") + lax.psum(v, D), axis_name="v"), 3, 2)


@case("turn", table=table(LINEAR))
def of_gradient(env: Env) -> Any:
    """vmap of grad, inside."""
    f = jax.vmap(jax.grad(lambda v: jnp.sum(jnp.sin(_op(env)(v)) * v[0])))
    return each(env, f, 3, 2 * env.size)


@case("turn", table=table([k for k in PRIMITIVES if k in LINEAR]))
def gradient_of_vmap_outside(env: Env) -> Any:
    """grad around vmap around the region."""
    g = env.smap(lambda w, x: lax.pmean(jnp.mean(jnp.sin(_op(env)(x[0] * w))), D), (P(), P(D)), P())
    f = jax.grad(lambda w, x: jnp.sum(jax.vmap(g, (0, None))(w, x) ** 2))
    return Program(f, (env.weights(3, 2), values(env, 2 * env.size, 2)))


@case("conform")
def index_of_both(env: Env) -> Any:
    """axis_index and axis_size of a vmapped and of the spanning axis."""
    f = jax.vmap(
        lambda v: v + lax.axis_index(D) * 100 + lax.axis_index("v") * lax.axis_size(D) + lax.axis_size("v"),
        axis_name="v",
    )
    return each(env, f, 3, 2)


@case("conform-mesh", mesh=DATA_MODEL, table=table(KINDS))
def spmd_axis_name(env: Env) -> Any:
    """vmap of the region along another axis of the mesh."""
    x = env.put(np.arange(4.0 * env.size * 2 * env.size, dtype=np.float32).reshape(4, env.size, -1) % 7, P(M, D))
    return Program(jax.vmap(on_ranks(env, _op(env)), spmd_axis_name=M), (x,))


@case("turn-mesh", mesh=DATA_MODEL, table=table([k for k in PRIMITIVES if k in LINEAR]))
def spmd_axis_name_gradient(env: Env) -> Any:
    """Residuals of a region that is mapped along another axis of the mesh."""
    x = env.put(np.arange(4.0 * env.size * 2 * env.size, dtype=np.float32).reshape(4, env.size, -1) % 7, P(M, D))
    f = env.smap(lambda x: lax.pmean(jnp.mean(jnp.sin(_op(env)(x[0]))), D), P(D), P())
    return Program(jax.vmap(jax.value_and_grad(f), spmd_axis_name=M), (x,))
