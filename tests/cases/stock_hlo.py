"""Programs without a spanning collective. They return their own text, which must be that of stock JAX.

They build their meshes from ``jax.devices()`` of their own process, so a stock process with as many devices is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import BOTH, DATA_MODEL, case
from harness.env import Env


def _mesh(*axes: str, types: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.local_devices())
    shape = (devices.size,) if len(axes) == 1 else (2, devices.size // 2)
    return Mesh(devices.reshape(shape), axes, axis_types=(types,) * len(axes))


def _texts(f: Callable[..., Any], *args: Any) -> dict[str, Any]:
    lowered = jax.jit(f).lower(*args)
    texts = {"lowered": lowered.as_text(), "compiled": lowered.compile().as_text()}
    return {k: np.frombuffer(v.encode(), np.uint8) for k, v in texts.items()}


def _x() -> np.ndarray:
    return np.arange(96, dtype=np.float32).reshape(16, 6)


@case("hlo", mesh=DATA_MODEL, vma=BOTH)
def psum_over_model(env: Env) -> Any:
    """Reductions over an axis that does not span."""
    f = jax.shard_map(
        lambda x: (lax.psum(x, "model"), lax.pmax(x, "model")),
        mesh=_mesh("model"),
        in_specs=P("model"),
        out_specs=P(),
        check_vma=env.vma,
    )
    return _texts(f, _x())


@case("hlo", mesh=DATA_MODEL, vma=BOTH)
def all_collectives(env: Env) -> Any:
    """Every collective, index and size over an axis that does not span."""

    def f(x: jax.Array) -> Any:
        n = lax.axis_size("model")
        g = lax.all_gather(x, "model", tiled=True)
        return (
            lax.psum_scatter(g, "model", tiled=True),
            lax.ppermute(x, "model", [(i, (i + 1) % n) for i in range(n)]),
            lax.all_to_all(g, "model", 0, 0, tiled=True)[: x.shape[0]],
            x + lax.axis_index("model") * n,
            jnp.sum(lax.pmean(x, "model"))[None] + jnp.zeros(1) * x[0, :1],
        )

    return _texts(
        jax.shard_map(f, mesh=_mesh("model"), in_specs=P("model"), out_specs=P("model"), check_vma=env.vma),
        _x(),
    )


@case("hlo", mesh=DATA_MODEL, vma=BOTH)
def gradient_loops_and_inner_jit(env: Env) -> Any:
    """grad, scan, cond, remat and nested jit over an axis that does not span."""
    h = jax.jit(lambda y: lax.psum(y, "model"))

    def f(x: jax.Array) -> jax.Array:
        c, _ = lax.scan(lambda c, t: (c + h(x[0] * t), None), jnp.zeros(6), jnp.arange(3.0))
        c = lax.cond(jnp.sum(c) > 0, lambda v: v * 2, lambda v: v, c)
        return jnp.sum(jax.checkpoint(lambda v: jnp.sin(h(v)))(x) * c)

    g = jax.shard_map(f, mesh=_mesh("model"), in_specs=P("model"), out_specs=P(), check_vma=env.vma)
    return _texts(jax.value_and_grad(lambda x: g(x)), _x())


@case("hlo", mesh=DATA_MODEL, vma=BOTH)
def other_axis_of_a_spanning_mesh(env: Env) -> Any:
    """A mesh that has the spanning axis, a program that reduces over the other one only."""
    f = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "model"),
        mesh=_mesh("data", "model"),
        in_specs=P("data", "model"),
        out_specs=P("data"),
        check_vma=env.vma,
    )
    return _texts(f, _x())


@case("hlo", mesh=DATA_MODEL, vma=(True,))
def compiler_partitioned(env: Env) -> Any:
    """No shard_map: jit over a mesh that has the spanning axis."""
    mesh = _mesh("data", "model")
    x = jax.device_put(_x(), NamedSharding(mesh, P("data", "model")))
    return _texts(
        lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x @ x.T).sum(0), NamedSharding(mesh, P("model"))),
        x,
    )


@case("hlo", mesh=DATA_MODEL, vma=(True,))
def single_device(env: Env) -> Any:
    """No mesh at all."""
    return _texts(lambda x: jnp.tanh(x @ x.T).sum(), _x())


@case("hlo", mesh=DATA_MODEL, vma=(True,))
def vmapped_axis(env: Env) -> Any:
    """A vmapped axis that has the spanning axis's name is still only a vmapped axis."""
    return _texts(jax.vmap(lambda x: x - lax.pmean(x, "data") + lax.axis_index("data"), axis_name="data"), _x())


@case("text", vma=BOTH)
def over_data(env: Env) -> Any:
    """Everything at once over the axis "data" of this process's devices: after a shutdown that is a usual axis."""

    def f(x: jax.Array) -> Any:
        c, _ = lax.scan(lambda c, t: (c + lax.psum(x * t, "data"), None), jnp.zeros(x.shape), jnp.arange(2.0))
        n = lax.axis_size("data")
        return lax.pmean(jnp.sin(x), "data") + c + n, lax.all_gather(x, "data")[0] + lax.axis_index("data")

    g = jax.shard_map(f, mesh=_mesh("data"), in_specs=P("data"), out_specs=(P(), P("data")), check_vma=env.vma)
    return _texts(g, _x())


@case("text", vma=BOTH)
def spanning(env: Env) -> Any:
    """A program full of exchanges, over the case's own mesh."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        a, _ = lax.scan(lambda c, t: (c + lax.psum(x[:, :2] * t, "data"), None), jnp.zeros((4, 2)), jnp.arange(3.0))
        g = jax.grad(lambda w: lax.pmean(jnp.mean((x @ w) ** 2), "data"))(w)
        big = lax.psum(jnp.zeros(40_000) + x[0, 0], "data")
        return a, g, lax.pmax(x, "data"), big, lax.psum({"p": x, "q": x[0]}, "data")

    g = env.smap(f, (P("data"), P()), P() if env.vma else (P(), P("data"), P(), P(), P()))
    return _texts(g, env.rows(), env.weights(6, 3))
