"""A Flax NNX transformer on real text, data-parallel across clusters that slice a global batch.

hetccl run --cluster left=2x1 --cluster right=1x2 -- python examples/train_transformer.py --steps 200
"""

import argparse
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_hetccl as hetccl
from jax_hetccl.demo import corpus
from jax_hetccl.demo.model import CharTransformer, ModelConfig, next_character_loss

ROWS_PER_DEVICE, LENGTH = 8, 64


def main() -> None:
    """Trains; the first process of the first cluster prints the loss, which is the same everywhere."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    world = hetccl.initialize(axes=("data",))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    text = corpus.make(steps, ROWS_PER_DEVICE * world.size, LENGTH)
    graph, parameters = nnx.split(CharTransformer(ModelConfig(corpus.VOCABULARY, LENGTH), rngs=nnx.Rngs(0)))
    parameters = hetccl.broadcast(parameters)
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(parameters)

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    def step(parameters: Any, state: Any, rows: jax.Array) -> Any:
        def loss_of(parameters: Any) -> jax.Array:
            return hetccl.pmean(next_character_loss(nnx.merge(graph, parameters), rows), "data")

        # The mean over all clusters is part of the loss, so JAX makes the gradients global by itself.
        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def load(index: int) -> jax.Array:
        """This cluster's rows of a global batch, on its own devices."""
        first = world.clusters[world.cluster].first_rank * ROWS_PER_DEVICE
        mine = text.rows(index, first, first + mesh.size * ROWS_PER_DEVICE)

        def part(where: Any) -> np.ndarray:
            return mine[where]

        return jax.make_array_from_callback(mine.shape, NamedSharding(mesh, PartitionSpec("data")), part)

    for index in range(steps):
        parameters, state, loss = step(parameters, state, load(index))
        loss = float(loss)  # waits: JAX on CPU can deadlock with many steps in flight
        if world.rank_of_device(jax.local_devices()[0]) == 0 and (index % 20 == 0 or index == steps - 1):
            print(f"step {index:4d}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
