"""FSDP in plain JAX: parameters sharded inside each cluster by jit, gradients combined between clusters.

hetccl run --cluster left=1x2 --cluster right=1x1 -- python examples/fsdp.py
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_hetccl as hetccl

hetccl.initialize()

ROWS, WIDTH, STEPS = 48, 96, 30
mesh = jax.make_mesh((1, jax.device_count()), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
rows_split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
sharded = NamedSharding(mesh, PartitionSpec("fsdp"))


@functools.partial(jax.jit, out_shardings=sharded)
def initial(key: jax.Array) -> Any:
    """Weights of three layers, made in shards."""
    shapes = [(WIDTH, 8), (WIDTH, WIDTH), (24, WIDTH)]
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape) / shape[1] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]


@functools.partial(jax.jit, donate_argnums=0, out_shardings=(sharded, None))
def train_step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Inside a cluster the compiler gathers weights and scatters gradients; each device syncs its own shards."""

    def loss_fn(params: Any) -> jax.Array:
        first, second, last = params
        return jnp.mean((jnp.tanh(jnp.tanh(x @ first.T) @ second.T) @ last.T - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    loss, grads = hetccl.sync((loss, grads), weight=len(x))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


params = initial(jax.random.key(0))
target = np.random.default_rng(1).normal(size=(8, 24)).astype(np.float32)
for i in range(STEPS):
    x = np.random.default_rng(i).normal(size=(ROWS, 8)).astype(np.float32)
    x = x[hetccl.process_slice(ROWS)]
    batch = (jax.make_array_from_process_local_data(rows_split, array) for array in (x, np.tanh(x @ target)))
    params, loss = train_step(params, *batch)
    print(f"step {i}: loss {float(loss):.6f}", flush=True)
