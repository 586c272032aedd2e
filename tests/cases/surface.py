"""What hetccl offers beside lax's functions: broadcast, make_mesh, sharded_cotangents."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import OFF, Program, case
from harness.env import D, Env


def _tree(seed: int) -> dict[str, Any]:
    """Values that differ between clusters if their seeds do; bits that a sum of floats would lose."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((7, 5)).astype(np.float32),
        "nested": [rng.integers(-100, 100, (3,)).astype(np.int32), rng.integers(0, 2, (4,)).astype(bool)],
        "half": rng.standard_normal(9).astype(np.float16),
        "brain": jnp.asarray(rng.standard_normal(9), jnp.bfloat16),
        "complex": (rng.standard_normal(3) + 1j * rng.standard_normal(3)).astype(np.complex64),
        "special": np.array([-0.0, np.nan, np.inf, 1e-45, 3e38], np.float32) * (1 if seed == 0 else 2),
        "scalar": np.float32(rng.standard_normal()),
        "empty": np.zeros((0, 3), np.float32),
        "large": rng.standard_normal(70_001).astype(np.float32),
    }


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@case(
    "smoke",
    "core",
    vma=OFF,
    exact=True,
    table={"first": {"root": 0}, "last": {"root": -1}, "name": {"root": "right"}},
)
def broadcast(env: Env) -> Any:
    """Every process gets the root's bits."""
    mine = 0 if env.oracle else env.first
    clusters = len(env.sizes) if not env.oracle else None
    root = env.params["root"]
    if env.oracle:  # the seeds are the clusters' first ranks: the oracle needs to know the root's only
        return _host(_tree(0)) if root == 0 else [np.int32(0)]
    import jax_hetccl

    index = len(env.sizes) - 1 if root == -1 else root
    got = jax_hetccl.broadcast(_tree(mine), root=index)
    if root == 0:
        return _host(got)
    first = sum(env.sizes[:-1]) if root == -1 else env.sizes[0]
    want = _host(_tree(first))
    for path, leaf in jax.tree_util.tree_leaves_with_path(_host(got)):
        there = want
        for key in path:
            there = there[getattr(key, "key", getattr(key, "idx", None))]
        assert np.asarray(there).tobytes() == leaf.tobytes(), f"{path} differs; {clusters} clusters"
    return [np.int32(0)]


@case("core", vma=OFF, exact=True)
def broadcast_device_arrays(env: Env) -> Any:
    """Arrays on the devices keep their sharding."""
    x = env.same(np.arange(12, dtype=np.float32) + (0 if env.oracle else env.first))
    if env.oracle:
        return x
    import jax_hetccl

    y = jax_hetccl.broadcast({"x": x})["x"]
    assert y.sharding == x.sharding
    return y


@case("core", exact=True)
def make_mesh(env: Env) -> Any:
    """hetccl.make_mesh agrees at once; programs over it are as over any other mesh."""
    if env.oracle:
        mesh = env.mesh
    else:
        import jax_hetccl

        mesh = jax_hetccl.make_mesh((env.count,), (D,), axis_types=(jax.sharding.AxisType.Auto,))
    return Program(env.smap(lambda x: env.psum(x, D), P(D), P(), mesh=mesh), (env.rows(),))


@case("core")
def sharded_cotangents(env: Env) -> Any:
    """Each cluster passes its own part of a global cotangent across a sharded output."""
    f = env.smap(lambda w, x: x @ w, (P(), P(D)), P(D))
    x, ct = env.rows(), env.rows(4, 3, seed=5)
    if env.oracle:
        scope: Any = contextlib.nullcontext()
    else:
        import jax_hetccl

        scope = jax_hetccl.sharded_cotangents()
    with scope:
        y, back = jax.vjp(f, env.weights(6, 3), x)
        return y, back(ct)
