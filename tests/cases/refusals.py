"""What this version does not do over a spanning axis: an error that says so, never a wrong value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import OFF, case
from harness.env import D, Env

_SUPPORTED = ("psum", "pmean", "pmax", "pmin", "axis_index", "axis_size")


def _says(op: str) -> dict[str, Any]:
    return {"op": op, "says": (op, D, *_SUPPORTED)}


def _call(op: str, env: Env, x: jax.Array) -> Any:
    n = env.size
    ring = [(i, (i + 1) % n) for i in range(n)]
    sized = jnp.zeros((n, 2)) + x[0, 0]
    calls = {
        "all_gather": lambda: lax.all_gather(x, D),
        "all_gather tiled": lambda: lax.all_gather(x, D, tiled=True),
        "psum_scatter": lambda: lax.psum_scatter(sized, D, tiled=True),
        "all_to_all": lambda: lax.all_to_all(sized, D, 0, 0, tiled=True),
        "ppermute": lambda: lax.ppermute(x, D, ring),
        "pshuffle": lambda: lax.pshuffle(x, D, list(range(n))[::-1]),
        "pswapaxes": lambda: lax.pswapaxes(sized, D, 0),
        "pbroadcast": lambda: lax.pbroadcast(x, D, 0),
        "psum groups": lambda: lax.psum(x, D, axis_index_groups=[[i] for i in range(n)]),
        "pmax groups": lambda: lax.pmax(x, D, axis_index_groups=[[i] for i in range(n)]),
        "pmin groups": lambda: lax.pmin(x, D, axis_index_groups=[[i] for i in range(n)]),
        "pmean groups": lambda: lax.pmean(x, D, axis_index_groups=[[i] for i in range(n)]),
    }  # fmt: skip
    return calls[op]()


# lax builds some operations out of others; the error names the one that reaches the compiler.
_TABLE = {
    "all_gather": _says("all_gather"),
    "all_gather tiled": _says("all_gather"),
    "psum_scatter": {"op": "psum_scatter", "says": (D, *_SUPPORTED)},
    "all_to_all": _says("all_to_all"),
    "ppermute": _says("ppermute"),
    "pshuffle": {"op": "pshuffle", "says": ("ppermute", D, *_SUPPORTED)},
    "pswapaxes": {"op": "pswapaxes", "says": ("all_to_all", D, *_SUPPORTED)},
    "pbroadcast": _says("pbroadcast"),
    "psum groups": {"op": "psum groups", "says": ("psum", "axis_index_groups", D)},
    "pmax groups": {"op": "pmax groups", "says": ("pmax", "axis_index_groups", D)},
    "pmin groups": {"op": "pmin groups", "says": ("pmin", "axis_index_groups", D)},
    "pmean groups": {"op": "pmean groups", "says": ("psum", "axis_index_groups", D)},
}


@case("refuse", vma=OFF, refused="UnsupportedError", table=_TABLE)
def jitted(env: Env) -> Any:
    """In jit."""
    return jax.jit(env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D)))(env.rows())


@case(
    "refuse",
    vma=OFF,
    refused="UnsupportedError",
    table={k: _TABLE[k] for k in ("all_gather", "ppermute", "psum groups")},
)
def eager(env: Env) -> Any:
    """Eagerly."""
    return env.smap(lambda x: _call(env.params["op"], env, x), P(D), P(D))(env.rows())


@case("refuse", refused="UnsupportedError", table={k: _TABLE[k] for k in ("all_gather", "all_to_all")})
def in_control_flow(env: Env) -> Any:
    """In a scan in a nested jit."""
    h = jax.jit(lambda x: _call(env.params["op"], env, x))

    def f(x: jax.Array) -> Any:
        return lax.scan(lambda c, _: (c, jnp.sum(h(x))), 0.0, None, length=2)[1]

    return jax.jit(env.smap(f, P(D), P(D)))(env.rows())


@case("refuse", vma=OFF, refused="UnsupportedError", says=(D,))
def tuple_with_all_gather(env: Env) -> Any:
    """An axis tuple that contains the spanning axis."""
    return jax.jit(env.smap(lambda x: lax.all_gather(x, (D,)), P(D), P(D)))(env.rows())


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
    return jax.jit(
        jax.shard_map(lambda x: env.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P())
    )(x)


@case("refuse", vma=OFF, exact=True)
def usable_after_refusals(env: Env) -> Any:
    """The world still works after an error at trace time."""
    for op in () if env.oracle else ("all_gather", "ppermute"):
        try:
            jax.jit(env.smap(lambda x, op=op: _call(op, env, x), P(D), P(D)))(env.rows())
        except NotImplementedError:  # UnsupportedError is one
            continue
        raise AssertionError(f"{op} was accepted")
    return jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P()))(env.rows())
