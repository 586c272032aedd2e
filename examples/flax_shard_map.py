"""Flax NNX, data-parallel in a shard_map. One line makes it span clusters; without it the file is a stock program.

hetccl run --cluster left=1x2 --cluster right=1x1 -- python examples/flax_shard_map.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jax_hetccl as hetccl

hetccl.initialize(axes=("data",))

ROWS_PER_DEVICE, STEPS = 16, 50
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
inputs = np.linspace(-1, 1, 1024, dtype=np.float32)[:, None]
targets = np.sin(3 * inputs)


class Model(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(1, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


@nnx.jit
@nnx.shard_map(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
def train_step(model: Model, optimizer: nnx.Optimizer, step: jax.Array) -> jax.Array:
    """Every device takes its own rows of the step's shuffled order: index and size of the axis are global."""
    device, devices = jax.lax.axis_index("data"), jax.lax.axis_size("data")
    order = jax.random.permutation(jax.random.fold_in(jax.random.key(0), step), len(inputs))
    rows = order[: devices * ROWS_PER_DEVICE].reshape(devices, ROWS_PER_DEVICE)[device]
    x, y = jnp.asarray(inputs)[rows], jnp.asarray(targets)[rows]

    def loss_fn(model: Model) -> jax.Array:
        return jax.lax.pmean(optax.l2_loss(model(x), y).mean(), "data")

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model = Model(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for i in range(STEPS):
    loss = train_step(model, optimizer, jnp.int32(i))
    print(f"step {i}: loss {float(loss):.6f}", flush=True)
