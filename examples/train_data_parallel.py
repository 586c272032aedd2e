"""Data-parallel training across clusters, as short as it gets.

hetccl run --cluster left=1x2 --cluster right=2x1@cpu -- python examples/train_data_parallel.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import jax_hetccl as hetccl

hetccl.initialize(axes=("data",))
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
target = jnp.arange(8.0)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
def step(w, i):
    """One step of linear regression; every device of every cluster draws its own rows."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(i), jax.lax.axis_index("data")), (32, 8))
    loss, grad = jax.value_and_grad(lambda w: jax.lax.pmean(jnp.mean((x @ (w - target)) ** 2), "data"))(w)
    return w - 0.1 * grad, loss


w = hetccl.broadcast(jnp.zeros(8))  # the same start everywhere
for i in range(100):
    w, loss = jax.block_until_ready(step(w, i))  # JAX on CPU can deadlock with many steps in flight
    if i % 20 == 19:
        print(f"step {i}: loss {float(loss):.2e}, w {jnp.round(w).astype(int)}", flush=True)
