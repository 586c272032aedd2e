"""Clusters of unequal speed: each takes as many rows of the global batch as it can compute in the same time.

hetccl run --cluster fast=1x2 --cluster slow=1x1 -- python examples/unequal_clusters.py --slow slow:3
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_hetccl as hetccl

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=192, help="of the global batch")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--every", type=int, default=10, help="steps between two calls of balance; 0: never")
parser.add_argument("--slow", default=":1", help="CLUSTER:FACTOR, a cluster that computes everything so many times")
args = parser.parse_args()

world = hetccl.initialize()
name = world.clusters[world.cluster].name
slow, factor = args.slow.split(":")
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    first, second, last = params
    return jnp.mean((jnp.tanh(jnp.tanh(x @ first) @ second) @ last - y) ** 2)


# What a cluster computes by itself is a program of its own, so that its time can be measured: that of a step with a sync is
# the slowest cluster's everywhere.
gradients = jax.jit(jax.value_and_grad(loss_of), out_shardings=everywhere)


@jax.jit
def update(params: Any, loss: jax.Array, grads: Any, rows: jax.Array) -> Any:
    """The means of unequal parts, weighted by their rows, are those of the whole batch."""
    loss, grads = hetccl.sync((loss, grads), weight=rows)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), loss


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The global batch of a step, the same in every process."""
    x = np.random.default_rng(step).normal(size=(args.rows, 16)).astype(np.float32)
    return x, np.tanh(x[:, :1] - x[:, 1:2])


sizes = ((16, args.width), (args.width, args.width), (args.width, 1))
keys = jax.random.split(jax.random.key(0), 3)
params = [jax.random.normal(k, (m, n)) / m**0.5 for k, (m, n) in zip(keys, sizes, strict=True)]
params = jax.device_put(params, everywhere)
multiples = [8 * cluster.devices for cluster in world.clusters]  # coarse: every new number of rows is compiled once
rows = hetccl.batch_sizes(args.rows, [cluster.devices for cluster in world.clusters], multiples=multiples)
times: list[float] = []
for i in range(args.steps):
    if args.every and i and i % args.every == 0:
        rows = hetccl.balance(rows, statistics.median(times[1:]), multiples=multiples)  # the first one compiled
        times = []
    begin = time.perf_counter()
    x, y = hetccl.shard_batch(batch(i), split, weights=rows, multiples=multiples)
    for _ in range(int(factor) if name == slow else 1):
        loss, grads = jax.block_until_ready(gradients(params, x, y))
    times.append(time.perf_counter() - begin)
    params, loss = jax.block_until_ready(update(params, loss, grads, jnp.float32(len(x))))
    whole = time.perf_counter() - begin
    print(
        f"step {i}: loss {float(loss):.6f}, rows {'+'.join(map(str, rows))}, "
        f"own {times[-1] * 1e3:.1f} ms, step {whole * 1e3:.1f} ms",
        flush=True,
    )
