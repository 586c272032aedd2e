"""Steps of a transformer with random weights, data-parallel over all ranks, as a child.

``{"steps", "rows", "length", "parameters"}`` gives the seconds of each step, tokens and loss. The environment says which
way the gradients go: a world of clusters (HETCCL_COORDINATOR), stock JAX over the devices here, or, with GLOO_MEET, JAX
over the devices here and PyTorch's Gloo over copies in host memory between the processes.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hetccl as hetccl
from gpu_bench.children import serve
from gpu_bench.programs import AXIS, JOINS, mesh, ranks
from jax_hetccl.demo.model import CharTransformer, ModelConfig, next_character_loss

STAGES = "GLOO_MEET" in os.environ
_VOCABULARY = 256

State = tuple[Any, Any]
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]


def sizes(parameters: float, length: int) -> ModelConfig:
    """About so many parameters: twelve squares of the width in each layer."""
    width = 2048 if parameters >= 1e8 else 64
    layers = max(1, round(parameters / (12 * width**2)))
    return ModelConfig(_VOCABULARY, length, width, heads=width // 64 if width < 128 else width // 128, layers=layers)


def _step(graph: Any, optimizer: Any) -> Step:
    """Loss, gradients and update in one program; their mean over all ranks is part of it."""

    def step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            return lax.pmean(next_character_loss(nnx.merge(graph, parameters), rows), AXIS)

        parameters, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(mapped, donate_argnums=(0,))


def _staged_step(graph: Any, optimizer: Any, mean: Callable[[np.ndarray], None]) -> Step:
    """Gradients of this process on its devices, through host memory for their mean, and back for the update."""

    def gradients_of(parameters: Any, rows: jax.Array) -> Any:
        def loss_of(parameters: Any) -> jax.Array:
            return lax.pmean(next_character_loss(nnx.merge(graph, parameters), rows), AXIS)

        return jax.value_and_grad(loss_of)(parameters)

    grads = jax.jit(jax.shard_map(gradients_of, mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P()))

    def updated(state: State, gradients: Any) -> State:
        parameters, moments = state
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments

    update = jax.jit(updated, donate_argnums=(0,))
    everywhere = NamedSharding(mesh(), P())

    def step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = grads(state[0], rows)
        leaves, tree = jax.tree.flatten(gradients)
        hosted = [np.array(leaf) for leaf in (loss[None], *leaves)]
        for leaf in hosted:
            mean(leaf)
        loss, *leaves = (jax.device_put(leaf, everywhere) for leaf in hosted)
        return update(state, jax.tree.unflatten(tree, leaves)), loss[0]

    return step


def _gloo_mean() -> Callable[[np.ndarray], None]:
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    rank, world = int(os.environ["GLOO_RANK"]), int(os.environ["GLOO_WORLD"])
    dist.init_process_group("gloo", init_method=os.environ["GLOO_MEET"], rank=rank, world_size=world)

    def mean(values: np.ndarray) -> None:
        dist.all_reduce(torch.from_numpy(values))
        values /= world

    return mean


def train(steps: int, rows: int, length: int, parameters: float, mean: Callable[[np.ndarray], None] | None) -> Any:
    """``rows`` for each device; the first step, which compiles, is not counted."""
    config = sizes(parameters, length)
    graph, weights = nnx.split(CharTransformer(config, rngs=nnx.Rngs(0)))
    everywhere = NamedSharding(mesh(), P())
    weights = jax.device_put(weights, everywhere)
    optimizer = optax.adamw(1e-4)
    state: State = (weights, jax.device_put(optimizer.init(weights), everywhere))
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    step = _step(graph, optimizer) if mean is None else _staged_step(graph, optimizer, mean)
    first = ranks()[1]  # every rank has its own rows, whatever process it is in
    shape = (rows, length + 1)
    drawn = [np.random.default_rng(first + i).integers(0, _VOCABULARY, shape) for i in range(jax.device_count())]
    numbers = np.concatenate(drawn)
    batch = jax.device_put(jnp.asarray(numbers, jnp.int32), NamedSharding(mesh(), P(AXIS)))
    times, losses = [], []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - begin)
        losses.append(float(loss.addressable_shards[0].data))
    return {"times": times[1:], "parameters": int(count), "tokens": int(numbers[:, 1:].size), "losses": losses}


def main() -> None:
    if JOINS:
        hetccl.initialize(axes=("data",))
    mean = _gloo_mean() if STAGES else None
    facts = {"kind": jax.devices()[0].device_kind, "devices": jax.device_count()}
    serve(facts, lambda q: train(q["steps"], q["rows"], q["length"], q["parameters"], mean))
    if JOINS:
        hetccl.shutdown()


if __name__ == "__main__":
    main()
