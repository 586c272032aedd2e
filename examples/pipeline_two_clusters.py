"""A pipeline of two stages: each cluster runs its own half of a model, and its own program.

hetccl run --cluster left=1x1 --cluster right=1x1 -- python examples/pipeline_two_clusters.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_hetccl as hetccl

STEPS, ROWS, RATE = 60, 32, 0.2
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs' default is shorter than float32, and not a CPU's
world = hetccl.initialize()  # before anything uses JAX's devices
first_weights, last_weights = (jax.random.normal(jax.random.key(k), s) / 3 for k, s in ((0, (8, 16)), (1, (16, 1))))


def batch(step):
    """The same rows in both clusters: the first stage takes the inputs, the last one the targets."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (ROWS, 8))
    return x, jnp.tanh(x[:, :1] - x[:, 1:2])


def on_one_device(step_count):
    """The losses of the same training on one device."""

    @jax.jit
    def step(w, x, y):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2))(w)
        return jax.tree.map(lambda a, g: a - RATE * g, w, grads), loss

    w, losses = (first_weights, last_weights), []
    for i in range(step_count):
        w, loss = step(w, *batch(i))
        losses.append(loss)
    return losses


if world.cluster == 0:

    @jax.jit
    def train_first(w, x):
        """What `send` returns counts as this stage's loss: its gradient comes from the last stage."""
        return w - RATE * jax.grad(lambda w: hetccl.send(jnp.tanh(x @ w), to="right"))(w)

    w = first_weights
    for i in range(STEPS):
        w = jax.block_until_ready(train_first(w, batch(i)[0]))

else:

    @jax.jit
    def train_last(w, like, y):
        """`like` is differentiated too: that is what sends its gradient back."""

        def loss_of(w, like):
            return jnp.mean((hetccl.recv(like, source="left") @ w - y) ** 2)

        loss, (grads, _) = jax.value_and_grad(loss_of, argnums=(0, 1))(w, like)
        return w - RATE * grads, loss

    w, losses = last_weights, []
    for i in range(STEPS):
        w, loss = jax.block_until_ready(train_last(w, jnp.zeros((ROWS, 16)), batch(i)[1]))
        losses.append(loss)
        if i % 20 == 0:
            print(f"step {i}: loss {float(loss):.4f}", flush=True)
    same = np.allclose(losses, on_one_device(STEPS), rtol=1e-4)
    print(f"losses equal those of one device: {same}", flush=True)
