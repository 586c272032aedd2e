"""Flax NNX, data-parallel by the compiler (nnx.jit). Three lines make it span clusters; the rest is a stock program.

hetccl run --cluster left=1x2 --cluster right=1x1 -- python examples/flax_jit.py
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_hetccl as hetccl

hetccl.initialize()

ROWS, STEPS = 48, 50
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
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
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over rows is the cluster's; the sync makes loss and gradients those of the whole batch."""
    loss, grads = nnx.value_and_grad(lambda model: optax.l2_loss(model(x), y).mean())(model)
    loss, grads = hetccl.sync((loss, grads), weight=len(x))
    optimizer.update(model, grads)
    return loss


model = Model(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), replicated))
shuffle = np.random.default_rng(0)
for i in range(STEPS):
    rows = shuffle.permutation(len(inputs))[:ROWS]
    rows = rows[hetccl.process_slice(ROWS)]
    x, y = (jax.make_array_from_process_local_data(split, array[rows]) for array in (inputs, targets))
    loss = train_step(model, optimizer, x, y)
    print(f"step {i}: loss {float(loss):.6f}", flush=True)
