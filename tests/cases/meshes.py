"""Meshes with further axes, axis types, partly manual regions, other device orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import DATA_MODEL, ON, MeshSpec, Program, case
from harness.env import D, Env, M

_MODEL_DATA = MeshSpec(("model", "data"), (("model", 2),))
_EXPLICIT = MeshSpec(types="explicit")
_EXPLICIT_2D = MeshSpec(("data", "model"), (("model", 2),), types="explicit")
_REVERSED = MeshSpec(order="reversed")
_THREE = MeshSpec(("pp", "data", "model"), (("pp", 2), ("model", 1)))
_API = ("lax", "hetccl")


def _jit_whole(env: Env, f: Callable[..., Any], spec: P | None = None) -> Callable[..., Any]:
    """jit with results laid out as told: over the automatic axes that is the compiler's choice otherwise."""
    return jax.jit(f, out_shardings=NamedSharding(env.mesh, spec or P()))


def _grid(env: Env, dtype: Any = np.float32) -> jax.Array:
    """Rows over data, columns over model."""
    value = np.random.default_rng(0).integers(-8, 8, (env.size * 4, 6)) / 4
    return env.put(value.astype(dtype), P(D, M))


@case("mesh", api=_API, mesh=DATA_MODEL, exact=True)
def data_only(env: Env) -> Any:
    """Reduce over the spanning axis, keep the other."""
    f = env.smap(lambda x: (env.psum(x, D), env.pmean(x, D), env.pmax(x, D), env.pmin(x, D)), P(D, M), P(None, M))
    return Program(f, (_grid(env),))


@case("mesh", api=_API, mesh=DATA_MODEL, exact=True)
def both_axes(env: Env) -> Any:
    """Reduce over several axes of which one spans, in both orders."""

    def f(x: jax.Array) -> Any:
        return (
            env.psum(x, (D, M)),
            env.psum(x, (M, D)),
            env.pmean(x, (D, M)),
            env.pmax(x, (M, D)),
            env.pmin(x, (D, M)),
        )

    return Program(env.smap(f, P(D, M), P()), (_grid(env),))


@case("mesh", mesh=DATA_MODEL, exact=True)
def model_only(env: Env) -> Any:
    """lax over the other axis stays in the cluster."""
    return Program(env.smap(lambda x: (lax.psum(x, M), lax.pmax(x, M)), P(D, M), P(D)), (_grid(env),))


@case("mesh", mesh=DATA_MODEL, exact=True)
def model_collectives_beside(env: Env) -> Any:
    """Every collective over the other axis works as always, beside exchanges."""

    def f(x: jax.Array) -> Any:
        s = env.psum(x, D)
        g = lax.all_gather(x, M, axis=1, tiled=True)
        p = lax.ppermute(s, M, [(0, 1), (1, 0)])
        r = lax.psum_scatter(s, M, scatter_dimension=0, tiled=True)
        return s, g, p, r, env.psum(g, D)

    out = (P(None, M), P(D), P(None, M), P(M), P())
    return Program(env.smap(f, P(D, M), out, check_vma=False), (_grid(env),))


@case("mesh", api=_API, mesh=DATA_MODEL, exact=True)
def indices_and_sizes(env: Env) -> Any:
    """Index and size over each axis and over tuples in both orders."""

    def f(x: jax.Array) -> Any:
        i = env.axis_index((D, M)) + 100 * lax.axis_index(M) + 1000 * env.axis_index(D) + 10000 * env.axis_index((M, D))
        return x + i, x * 0 + env.axis_size((D, M)) + 100 * env.axis_size(D) + 1000 * lax.axis_size(M)

    return Program(env.smap(f, P(D, M), P(D, M)), (_grid(env),))


@case("mesh", mesh=_MODEL_DATA, exact=True)
def spanning_axis_last(env: Env) -> Any:
    """The spanning axis as the minor axis of the mesh."""

    def f(x: jax.Array) -> Any:
        return (
            env.psum(x, D),
            env.psum(x, (M, D)),
            env.axis_index((M, D))[None, None] + 10 * env.axis_index(D),
        )

    return Program(env.smap(f, P(D, M), (P(None, M), P(), P(D, M))), (_grid(env),))


@case("mesh", mesh=_MODEL_DATA, exact=True)
def rows_over_both_axes(env: Env) -> Any:
    """One dimension sharded over both axes."""
    value = np.arange(env.size * 2 * 3, dtype=np.float32).reshape(-1, 3)
    x = env.put(value, P((M, D)))
    return Program(env.smap(lambda x: (env.psum(x, D), env.psum(x, (D, M))), P((M, D)), (P(M), P())), (x,))


@case("mesh", mesh=_THREE, exact=True)
def three_axes(env: Env) -> Any:
    """pipeline, data, model: only data spans."""
    x = env.put((np.arange(2 * env.size * 4) % 17).reshape(2, env.size, 4).astype(np.float32), P("pp", D, M))

    def f(x: jax.Array) -> Any:
        return env.psum(x, D), env.psum(x, ("pp", D)), lax.psum(x, "pp"), env.psum(x, ("pp", D, M))

    return Program(env.smap(f, P("pp", D, M), (P("pp", None, M), P(None, None, M), P(None, D, M), P())), (x,))


@case("mesh", mesh=DATA_MODEL)
def tensor_parallel_gradient(env: Env) -> Any:
    """A column- and row-parallel layer pair: psum over model in the forward pass, data in the backward pass."""

    def f(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w1)
        y = lax.psum(h @ w2, M)
        return env.pmean(jnp.mean(y**2), D)

    g = env.smap(f, (P(None, M), P(M, None), P(D)), P())
    x = env.rows()
    w1 = env.put((np.random.default_rng(2).integers(-8, 8, (6, 8)) / 8).astype(np.float32), P(None, M))
    w2 = env.put((np.random.default_rng(4).integers(-8, 8, (8, 3)) / 8).astype(np.float32), P(M, None))
    return Program(jax.value_and_grad(lambda w1, w2: g(w1, w2, x), argnums=(0, 1)), (w1, w2))


@case("mesh", vma=ON, mesh=DATA_MODEL)
def implicit_gradient(env: Env) -> Any:
    """JAX's own gradient reductions over both axes."""

    def f(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: jnp.mean(jnp.sin(x) * w))(w)

    return Program(env.smap(f, (P(), P(D, M)), P()), (env.weights(1), _grid(env)))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual(env: Env) -> Any:
    """Only the spanning axis is manual; the other is left to the compiler."""

    def f(x: jax.Array) -> Any:
        return env.psum(x, D), env.pmean(x, D), env.pmax(x, D), env.pmin(x, D)

    return _jit_whole(env, env.smap(f, P(D), P(), axis_names={D}))(_grid(env))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual_index(env: Env) -> Any:
    """Index and size in a partly manual region."""

    def f(x: jax.Array) -> Any:
        return x + env.axis_index(D) * env.axis_size(D)

    return _jit_whole(env, env.smap(f, P(D), P(D), axis_names={D}), P(D))(_grid(env))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual_many(env: Env) -> Any:
    """Several exchanges, a scan and a cond in a partly manual region."""

    def f(x: jax.Array) -> Any:
        a = env.psum(x, D)
        b, _ = lax.scan(lambda c, t: (c + env.psum(x[:, :2] * t, D), None), jnp.zeros((4, 2)), jnp.arange(3.0))
        c = lax.cond(jnp.sum(a) < 1e9, lambda t: env.psum(t, D), lambda t: env.pmax(t, D), x[0])
        return a, b, c, env.psum({"p": x * 2, "q": x[:, 0]}, D)

    return _jit_whole(env, env.smap(f, P(D), P(), axis_names={D}))(_grid(env))


@case("mesh", mesh=DATA_MODEL)
def partial_manual_gradient_outside(env: Env) -> Any:
    """grad around a partly manual region."""
    x = _grid(env)

    def loss(w: jax.Array) -> jax.Array:
        return env.smap(lambda w, x: env.pmean(jnp.mean((x @ w) ** 2), D), (P(), P(D)), P(), axis_names={D})(w, x)

    return Program(jax.value_and_grad(loss), (env.weights(6, 3),))


@case("mesh", vma=ON, mesh=DATA_MODEL)
def partial_manual_gradient_inside(env: Env) -> Any:
    """grad in a partly manual region, weights sharded over the automatic axis."""
    w = env.put((np.random.default_rng(2).integers(-8, 8, (6, 8)) / 8).astype(np.float32), P(None, M))

    def f(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: env.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), D))(w)

    return _jit_whole(env, env.smap(f, (P(), P(D)), P(), axis_names={D}))(w, env.rows())


@case("mesh", mesh=DATA_MODEL)
def partial_manual_sharded_weights(env: Env) -> Any:
    """A large auto-sharded operand in a partly manual region keeps its sharding."""
    w = env.put(np.random.default_rng(2).standard_normal((128, 64)).astype(np.float32), P(None, M))
    f = env.smap(lambda w, x: env.psum(w * jnp.sum(x), D), (P(), P(D)), P(), axis_names={D})
    return jax.jit(f, out_shardings=NamedSharding(env.mesh, P(None, M)))(w, env.rows())


@case("mesh", mesh=DATA_MODEL, exact=True)
def nested_manual(env: Env) -> Any:
    """A region over data, in it a region over model."""

    def outer(x: jax.Array) -> Any:
        inner = jax.shard_map(
            lambda y: env.psum(lax.psum(y, M), D),
            in_specs=P(None, M),
            out_specs=P(),
            axis_names={M},
            check_vma=env.vma,
        )
        return inner(x), env.psum(x, D)

    with jax.set_mesh(env.mesh):
        f = jax.shard_map(outer, in_specs=P(D), out_specs=P(), axis_names={D}, check_vma=env.vma)
        return _jit_whole(env, f)(_grid(env))


@case("mesh", mesh=DATA_MODEL, exact=True)
def set_mesh_2d(env: Env) -> Any:
    """The mesh comes from the context."""
    with jax.set_mesh(env.mesh):
        f = jax.shard_map(lambda x: env.psum(x, D), in_specs=P(D, M), out_specs=P(None, M), check_vma=env.vma)
        return jax.jit(f)(_grid(env))


@case("mesh", mesh=_EXPLICIT_2D, exact=True)
def explicit_types_2d(env: Env) -> Any:
    """Explicit sharding: fully manual and partly manual regions."""
    with jax.set_mesh(env.mesh):
        full = jax.shard_map(lambda x: env.psum(x, (D, M)), in_specs=P(D, M), out_specs=P(), check_vma=env.vma)
        part = jax.shard_map(lambda x: env.psum(x, D), in_specs=P(D), out_specs=P(), axis_names={D}, check_vma=env.vma)
        x = _grid(env)
        return jax.jit(full)(x), jax.jit(part)(x)


@case("core", mesh=_EXPLICIT, exact=True)
def explicit_types(env: Env) -> Any:
    """Explicit sharding on the spanning axis alone."""
    f = env.smap(lambda x: (env.psum(x, D), x + env.axis_index(D)), P(D), (P(), P(D)))
    return Program(f, (env.rows(),))


@case("core", mesh=_EXPLICIT)
def explicit_types_gradient(env: Env) -> Any:
    """grad around a region on an explicit mesh."""
    f = env.smap(lambda w, x: env.pmean(jnp.mean((x @ w) ** 2), D), (P(), P(D)), P())
    with jax.set_mesh(env.mesh):
        return Program(jax.value_and_grad(lambda w, x: f(w, x)), (env.weights(6, 3), env.rows()))


@case("core", mesh=_REVERSED, exact=True)
def reversed_devices(env: Env) -> Any:
    """A mesh whose device order is not the ids' order: ranks follow the mesh."""

    def f(x: jax.Array) -> Any:
        return env.psum(x * (env.axis_index(D) + 1), D), x + env.axis_index(D)

    return Program(env.smap(f, P(D), (P(), P(D))), (env.rows(),))
