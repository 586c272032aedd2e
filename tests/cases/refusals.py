"""What this version does not do over a spanning axis: an error that says so, never a wrong value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lax import parallel
from jax.sharding import PartitionSpec as P

from harness.case import OFF, ON, case
from harness.env import D, Env

_SUPPORTED = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "pbroadcast",
    "axis_index",
    "axis_size",
)
_OPS = ("ragged_all_to_all",)
_ONE_SIDED = ("psend", "precv")
_STARTED = ("all_gather_start", "psum_scatter_start", "all_to_all_start", "ppermute_start")


def _call(op: str, env: Env, x: jax.Array) -> Any:
    n = env.size
    sized = jnp.zeros((n, 2)) + x[0, 0]
    counts = jnp.ones(n, jnp.int32)
    ring = [(i, (i + 1) % n) for i in range(n)]
    calls = {
        "ragged_all_to_all": lambda: lax.ragged_all_to_all(
            sized, sized, jnp.arange(n), counts, jnp.arange(n), counts, axis_name=D
        ),
        # Both are refused before they are used: the one that is lowered first says so.
        "psend": lambda: parallel.precv(parallel.psend(x, D, ring), jax.typeof(x), D, ring),
        "precv": lambda: parallel.precv(jax.lax.create_token(x), jax.typeof(x), D, ring),
        # No public names: JAX's own libraries start collectives this way.
        "all_gather_start": lambda: parallel.all_gather_start(sized, D).done(),
        "psum_start": lambda: parallel.psum_start(sized, D).done(),
        "psum_scatter_start": lambda: parallel.psum_scatter_start(sized, D, tiled=True).done(),
        "all_to_all_start": lambda: parallel.all_to_all_start(sized, D, 0, 0, tiled=True).done(),
        "ppermute_start": lambda: parallel.ppermute_start(x, D, ring).done(),
    }
    return calls[op]()


_TABLE: dict[str, dict[str, Any]] = {op: {"op": op, "says": (op, D, *_SUPPORTED)} for op in _OPS}


@case("refuse", vma=OFF, refused="UnsupportedError", table={op: {"op": op, "says": (op, D)} for op in _ONE_SIDED})
def one_sided(env: Env) -> Any:
    """psend and precv: hetccl.send and recv are for clusters."""
    return jax.jit(env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D)))(env.rows())


_STARTS: dict[str, dict[str, Any]] = {
    op: {"op": op, "says": (op.removeprefix("psum_").split("_")[0], D)} for op in _STARTED
}


@case("refuse", vma=OFF, refused="UnsupportedError", table=_STARTS)
def asynchronous(env: Env) -> Any:
    """Collectives that are started and ended separately: the exchanges are asynchronous anyway."""
    return jax.jit(env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D)))(env.rows())


@case("refuse", vma=ON, refused="UnsupportedError", says=("psum", "start", D))
def asynchronous_sum(env: Env) -> Any:
    """The same for psum, whose result does not vary."""
    return jax.jit(env.smap(lambda x: _call("psum_start", env, x), P(D), P()))(env.rows())


@case("refuse", vma=OFF, refused="UnsupportedError", table=_TABLE)
def jitted(env: Env) -> Any:
    """In jit."""
    return jax.jit(env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D)))(env.rows())


@case(
    "refuse",
    vma=OFF,
    refused="UnsupportedError",
    table=_TABLE,
)
def eager(env: Env) -> Any:
    """Eagerly."""
    return env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D))(env.rows())


@case("refuse", refused="UnsupportedError", table=_TABLE)
def in_control_flow(env: Env) -> Any:
    """In a scan in a nested jit."""
    h = jax.jit(lambda x: _call(env.params["op"], env, x))

    def f(x: jax.Array) -> Any:
        return lax.scan(lambda c, _: (c, jnp.sum(h(x))), 0.0, None, length=2)[1]

    return jax.jit(env.smap(f, P(D), P(D)))(env.rows())


@case("refuse", refused="HetcclError", says=("out_specs", D))
def gradient_across_sharded_output(env: Env) -> Any:
    """A loss averaged outside over a sharded output would add up the clusters' separate losses."""
    f = env.smap(lambda w, x: x @ w, (P(), P(D)), P(D))
    return jax.jit(jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2)))(env.weights(6, 3), env.rows())


@case("refuse", refused="HetcclError", says=("out_specs", D))
def gradient_across_sharded_output_eager(env: Env) -> Any:
    """The same without jit, and with respect to the sharded operand."""
    f = env.smap(lambda x: jnp.sin(x), P(D), P(D))
    return jax.grad(lambda x: jnp.sum(f(x)))(env.rows())


@case("refuse", vma=OFF, api=("hetccl",), refused="HetcclError", says=("model", "span"))
def hetccl_function_over_another_axis(env: Env) -> Any:
    """hetccl.psum checks that its axis spans, and says how to make it so."""
    import numpy as np
    from jax.sharding import Mesh

    mesh = Mesh(np.array(env.mesh.devices), ("model",))
    x = jax.device_put(np.ones((env.count * 2, 3), np.float32), jax.sharding.NamedSharding(mesh, P("model")))
    return jax.jit(jax.shard_map(lambda x: env.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P()))(x)


@case("refuse", vma=OFF, exact=True)
def usable_after_refusals(env: Env) -> Any:
    """The world still works after an error at trace time."""
    for op in () if env.oracle else ("ragged_all_to_all",):
        try:
            jax.jit(env.smap(lambda x, op=op: _call(op, env, x), P(D), P(D)))(env.rows())
        except NotImplementedError:  # UnsupportedError is one
            continue
        raise AssertionError(f"{op} was accepted")
    return jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P()))(env.rows())
