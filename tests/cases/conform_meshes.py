"""Every collective over a mesh with further axes: over one, over both in either order, partly manual, nested.

The behaviour is what JAX's tests check: shard_map_test.py (gathers, sums, scatters, transposes and permutations over
tuples of axes, partly manual regions, nested regions, axes of size 1, axis_index over several axes) and the systematic
cases there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, LINEAR, PRIMITIVES, grid, op, table
from harness.case import BOTH, DATA_MODEL, MeshSpec, Program, case
from harness.env import D, Env, M

_AXES: dict[str, Any] = {"data": D, "data,model": (D, M), "model,data": (M, D), "model": M}
_MODEL_FIRST = MeshSpec(("model", "data"), (("model", 2),))
_ONES = MeshSpec(("one", "data", "model", "uno"), (("one", 1), ("model", 2), ("uno", 1)))


def _over(env: Env, name: str, axes: str) -> Any:
    n = {"data": env.size, "model": 2}.get(axes, 2 * env.size)
    return op(env, name, _AXES[axes], n), 2 * n


# From jax 0.11 on, permutations want a tuple of axes in the mesh's order.
_REFUSED = BOTH if jax.__version_info__ >= (0, 11) else ()


def _rows(names: tuple[str, ...], axes: tuple[str, ...], mesh: str = "data,model") -> dict[str, dict[str, Any]]:
    def rejects(name: str, axes: str) -> tuple[bool, ...]:
        return _REFUSED if name in ("ppermute", "pshuffle") and "," in axes and axes != mesh else ()

    return {f"{k} {a}": {"op": k, "axes": a, "rejects": rejects(k, a)} for k in names for a in axes}


_TUPLES = ("data,model", "model,data")
_LINEAR_PRIMITIVES = tuple(k for k in PRIMITIVES if k in LINEAR)


@case("conform-mesh", mesh=DATA_MODEL, table=_rows(KINDS, ("data", *_TUPLES)) | _rows(PRIMITIVES, ("model",)))
def value(env: Env) -> Any:
    """Over the spanning axis, the other one, and both in either order."""
    f, rows = _over(env, env.params["op"], env.params["axes"])
    return grid(env, f, rows, 2)


@case("turn-mesh", mesh=DATA_MODEL, table=_rows(LINEAR, _TUPLES))
def vjp(env: Env) -> Any:
    """Cotangents over both axes in either order."""
    op_, rows = _over(env, env.params["op"], env.params["axes"])

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: jnp.sin(op_(x)), x)
        return y, back(y * 2)[0]

    return grid(env, f, rows, 2)


@case("turn-mesh", mesh=DATA_MODEL, table=_rows(PRIMITIVES, _TUPLES))
def vmap(env: Env) -> Any:
    """Batched, over both axes in either order."""
    f, rows = _over(env, env.params["op"], env.params["axes"])
    return grid(env, jax.vmap(f, 1, 1), rows, 3)


@case("turn-mesh", mesh=DATA_MODEL, table=_rows(PRIMITIVES, ("data", "data,model")))
def scan(env: Env) -> Any:
    """In a loop, beside a sum over the other axis."""
    g, rows = _over(env, env.params["op"], env.params["axes"])

    def f(x: jax.Array) -> Any:
        body = lambda c, t: (c * 0.5 + jnp.sum(jnp.sin(g(c + t))) + lax.psum(c, M) * 0.125, None)  # noqa: E731
        return lax.scan(body, x, jnp.arange(3.0))[0]

    return grid(env, f, rows, 2)


@case("turn-mesh", mesh=_MODEL_FIRST, table=_rows(PRIMITIVES, ("data", *_TUPLES), "model,data"))
def spanning_axis_last(env: Env) -> Any:
    """The spanning axis is the mesh's minor one."""
    f, rows = _over(env, env.params["op"], env.params["axes"])
    return grid(env, f, rows, 2)


def _with_ones(env: Env, f: Any, *shape: int) -> Program:
    """``f`` on each rank's array, which varies along all four axes."""
    spec = P(("one", D), (M, "uno"))
    x = env.put(np.random.default_rng(0).integers(-4, 4, (env.size, 2, *shape)).astype(np.float32), spec)
    return Program(env.smap(lambda x: jax.tree.map(lambda t: t[None, None], f(x[0, 0])), spec, spec), (x,))


@case(
    "turn-mesh",
    mesh=_ONES,
    table={f"{k} {','.join(a)}": {"op": k, "axes": a} for k in PRIMITIVES for a in (("one", D), (D, "uno"))},
)
def axes_of_size_one(env: Env) -> Any:
    """Axes of one rank beside the spanning one change nothing."""
    return _with_ones(env, op(env, env.params["op"], env.params["axes"]), 2 * env.size, 2)


@case("turn-mesh", mesh=_ONES, table=table(PRIMITIVES))
def over_an_axis_of_size_one(env: Env) -> Any:
    """Collectives of one rank, beside a sum over all."""
    return _with_ones(env, lambda x: (op(env, env.params["op"], "one", 1)(x), lax.psum(x, D)), 2, 3)


# XLA refuses some programs with a dozen and more of these regions ("Side-effect ops cannot be replicated").
_PART = "alone"


def _part(env: Env, f: Any, rows: int) -> Program:
    """``f`` on each rank's rows in a region that leaves the other axis to the compiler."""
    x = env.put(np.arange(env.size * rows * 4, dtype=np.float32).reshape(env.size * rows, 4) % 13, P(D, M))
    part = env.smap(f, P(D), P(D), axis_names={D})
    out = NamedSharding(env.mesh, P(D))  # over the automatic axis it is the compiler's choice otherwise
    return Program(lambda x: lax.with_sharding_constraint(part(x), out), (x,), _PART)


@case("conform-mesh", mesh=DATA_MODEL, table=table(KINDS))
def partly_manual(env: Env) -> Any:
    """Only the spanning axis is manual."""
    f = op(env, env.params["op"])
    return _part(env, lambda x: f(x)[None], 2 * env.size)


@case("turn-mesh", mesh=DATA_MODEL, table=table(PRIMITIVES))
def partly_manual_scan(env: Env) -> Any:
    """In a loop in a partly manual region."""
    g = op(env, env.params["op"])

    def f(x: jax.Array) -> Any:
        return lax.scan(lambda c, t: (c * 0.5 + jnp.sum(g(c + t)) * 0.125, None), x, jnp.arange(3.0))[0]

    return _part(env, f, 2 * env.size)


@case("turn-mesh", mesh=DATA_MODEL, table=table(_LINEAR_PRIMITIVES))
def partly_manual_gradient(env: Env) -> Any:
    """grad around a partly manual region."""
    g = op(env, env.params["op"])
    x = env.put(np.arange(env.size * 2 * env.size * 4, dtype=np.float32).reshape(-1, 4) % 13, P(D, M))
    f = env.smap(lambda w, x: lax.pmean(jnp.mean(jnp.sin(g(x * w))), D), (P(), P(D)), P(), axis_names={D})
    out = NamedSharding(env.mesh, P())

    def h(w: jax.Array, x: jax.Array) -> Any:
        return lax.with_sharding_constraint(jax.value_and_grad(f)(w, x), out)

    return Program(h, (env.weights(4), x), _PART)


@case("conform-mesh", mesh=DATA_MODEL, table=table(KINDS))
def nested_regions(env: Env) -> Any:
    """A region over the spanning axis, in it one over the other axis: the collective in both."""
    g = op(env, env.params["op"])

    rank = {"psum_scatter": 2, "all_gather": 4}.get(env.params["op"], 3)

    def outer(x: jax.Array) -> Any:
        inner = jax.shard_map(
            lambda y: g(y * lax.psum(y, M))[None],
            in_specs=P(None, M),
            out_specs=P(*[None] * (rank - 1), M),
            axis_names={M},
            check_vma=env.vma,
        )
        return inner(x), g(x)[None]

    with jax.set_mesh(env.mesh):
        return _part(env, outer, 2 * env.size)


@case("conform-mesh", mesh=DATA_MODEL)
def indices(env: Env) -> Any:
    """The index over each axis, and over both in either order."""

    def f(x: jax.Array) -> Any:
        return [x + lax.axis_index(a) for a in _AXES.values()] + [jnp.int32(lax.axis_size(a)) for a in _AXES.values()]

    return grid(env, f, 2, dtype="int32")


@case("conform-mesh", mesh=DATA_MODEL)
def invariant_gather(env: Env) -> Any:
    """Gathers that drop the spanning axis, the other one, or both, and their gradients."""

    def f(x: jax.Array) -> Any:
        return (
            lax.all_gather(x, D, axis=0, tiled=True, to="invarying"),
            lax.all_gather(x, M, axis=1, tiled=True, to="invarying"),
            lax.all_gather(x, (D, M), axis=1, tiled=True, to="invarying"),
        )

    x = env.put(np.arange(env.size * 2 * 2 * 3, dtype=np.float32).reshape(env.size * 2, 6), P(D, M))
    g = env.smap(f, P(D, M), (P(None, M), P(D), P()))
    return Program(lambda x: (g(x), jax.grad(lambda x: jnp.sum(jnp.sin(g(x)[2])))(x)), (x,))


@case("conform-mesh", mesh=DATA_MODEL)
def product_of_shards(env: Env) -> Any:
    """Rows over one axis, columns over both: a product, a scatter over one axis and one over both."""

    def f(a: jax.Array, b: jax.Array) -> Any:
        c = a @ b
        return lax.psum_scatter(c, M, tiled=True), lax.psum_scatter(c, (D, M), scatter_dimension=1, tiled=True)

    a = env.put(np.arange(env.size * 2 * 4, dtype=np.float32).reshape(env.size * 2, 4) % 5, P(D, M))
    b = env.put(np.arange(4 * env.size * 4, dtype=np.float32).reshape(4, -1) % 3, P(M))
    return Program(env.smap(f, (P(D, M), P(M)), (P((D, M)), P(None, (D, M)))), (a, b))
