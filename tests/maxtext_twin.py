"""A twin of MaxText's train step for tests/test_maxtext_gradients.py: its loss and accumulation in a few lines.

Each process computes a step on the whole batch with the twin alone, and on its rows with what jax_hetccl puts in its place.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_hetccl as hetccl
from jax_hetccl.integrations.maxtext import gradients, state

EPS = 1e-8


def loss_fn(model, config, data, dropout_rng, params, sparsity_state=None, is_train=True):
    """A masked mean over tokens (with accumulation a sum), and what MaxText returns beside it."""
    squares = ((model(data["x"])[..., 0] - data["y"]) ** 2) * data["counts"]
    aux = {
        "xent_sum": squares.sum(),
        "total_weights": data["counts"].sum(),
        "z_loss": squares.sum() / (data["counts"].sum() + EPS),
        "moe_lb_loss": 0.0,
    }
    return (aux["xent_sum"] if config["accumulation"] > 1 else aux["z_loss"]), aux


def accumulated(_loss_fn, config, model, params, params_shardings, data, dropout_rng):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    n = config["accumulation"]
    total, found = jax.tree.map(jnp.zeros_like, params), []
    for i in range(n):
        part = jax.tree.map(lambda x: x[i::n], data)

        def loss(p, part=part):
            return _loss_fn(nnx.merge(graph, p, rest), config, part, None, None, is_train=True)

        (_, aux), g = jax.value_and_grad(loss, has_aux=True)(params)
        total = jax.tree.map(jnp.add, total, g)
        found.append(aux)
    aux = jax.tree.map(lambda *xs: sum(xs), *found)
    tokens = jnp.maximum(aux["total_weights"], 1)
    return aux["xent_sum"] / tokens, aux, jax.tree.map(lambda g: g / tokens, total)


def step(loss, accumulate, config, model, data):
    if config["accumulation"] > 1:
        return accumulate(loss, config, model, None, None, data, None)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(p):
        return loss(nnx.merge(graph, p, rest, copy=True), config, data, None, None, is_train=True)

    (value, aux), found = jax.value_and_grad(loss_of, has_aux=True)(params)
    return value, aux, found


def check(counts: list[list[int]], accumulation: int) -> None:
    world = hetccl.world()
    rows, length = len(counts), len(counts[0])
    random = np.random.default_rng(0)
    data = {
        "x": jnp.asarray(random.normal(size=(rows, length, 3)), jnp.float32),
        "y": jnp.asarray(random.normal(size=(rows, length)), jnp.float32),
        "counts": jnp.asarray(counts, jnp.int32),
    }
    first = 4  # rows of the first cluster
    own = jax.tree.map(lambda x: x[:first] if world.cluster == 0 else x[first:], data)
    model, config = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), {"accumulation": accumulation}
    expected = jax.jit(lambda d: step(loss_fn, accumulated, config, model, d))(data)
    loss, accumulate = gradients.loss_fn(loss_fn), gradients.accumulation(accumulated, loss_fn)
    found = jax.jit(lambda d: step(loss, accumulate, config, model, d))(own)
    value, aux, grads = jax.block_until_ready(found)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    assert int(aux["total_weights"]) == int(expected[1]["total_weights"]) == int(np.sum(counts))
    np.testing.assert_allclose(aux["xent_sum"], expected[1]["xent_sum"], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    hetccl.check_replicas({"loss": value, "gradients": grads})

    norm = float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(expected[2]))))
    clip = gradients.clipping(lambda *_: None)
    for threshold in (norm / 4, norm * 4) if norm else ():  # optax divides by the norm
        clipped = jax.jit(lambda g: clip(g, None, threshold))(grads)
        for one, other in zip(jax.tree.leaves(clipped), jax.tree.leaves(expected[2]), strict=True):
            np.testing.assert_allclose(one, other * min(1, threshold / norm), rtol=1e-5, atol=1e-7)


def drift() -> None:
    """Of a state that differs between clusters the first one's is kept, in place, before the checkpoint is written."""
    # More layers than digits: as names they have another order.
    layers, world = nnx.List([nnx.Linear(3, 2, rngs=nnx.Rngs(i)) for i in range(11)]), hetccl.world()
    expected = np.stack([layer.kernel[...] for layer in layers])
    if world.cluster == 1:
        for layer in layers:
            layer.kernel[...] = layer.kernel[...] * 2
    drifted, saved = nnx.state(layers), []

    def write(_, found, *others) -> None:
        saved.append(np.stack([found[i]["kernel"][...] for i in range(11)]))

    save = state.save(write)
    config = types.SimpleNamespace(checkpoint_period=2)
    save(None, drifted, config, None, 1)
    assert world.cluster == 0 or (saved[-1] == 2 * expected).all(), "not compared between checkpoints"
    save(None, drifted, config, None, 2)
    np.testing.assert_array_equal(saved[-1], expected)
    hetccl.check_replicas(nnx.to_pure_dict(drifted))


def main() -> None:
    hetccl.initialize()
    drift()
    some = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 1]]
    none = [[0] * 4] * 6
    for accumulation in (1, 2):
        check(some, accumulation)
        check([*some[:4], *none[4:]], accumulation)  # the second cluster has padding alone
        check(none, accumulation)
    print("as in one world")


if __name__ == "__main__":
    main()
