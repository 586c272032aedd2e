"""A Flax NNX transformer on real text, for clusters behind a slow link: local steps, and now and then an outer step.

hetccl run --cluster left=1x1 --cluster right=1x2 -- python examples/train_diloco.py --steps 200 --every 10 --overlap
"""

import argparse
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_hetccl as hetccl
from jax_hetccl.demo import corpus
from jax_hetccl.demo.model import CharTransformer, ModelConfig, next_character_loss

ROWS_PER_DEVICE, LENGTH = 8, 64


def main() -> None:
    """Trains; the first process of the first cluster prints the loss of what all clusters share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="local steps from one outer step to the next")
    parser.add_argument("--overlap", action="store_true", help="exchange what a local step begins with")
    parser.add_argument("--wire-dtype", help="bfloat16, float8_e4m3fn or int8")
    given = parser.parse_args()

    world = hetccl.initialize()  # no axis spans: each cluster is a JAX world of its own but for the outer steps
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    text = corpus.make(given.steps + 1, ROWS_PER_DEVICE * world.size, LENGTH)
    graph, parameters = nnx.split(CharTransformer(ModelConfig(corpus.VOCABULARY, LENGTH), rngs=nnx.Rngs(0)))
    parameters = hetccl.broadcast(jax.device_put(parameters, everywhere))  # the same start everywhere
    inner = optax.adamw(3e-3)
    outer = hetccl.optax.diloco(
        optax.sgd(0.7, momentum=0.9, nesterov=True), given.every, overlap=given.overlap, wire_dtype=given.wire_dtype
    )
    inner_state, outer_state = jax.jit(inner.init)(parameters), jax.jit(outer.init)(parameters)

    def loss_of(parameters: Any, rows: jax.Array) -> jax.Array:
        return next_character_loss(nnx.merge(graph, parameters), rows)

    @partial(jax.jit, donate_argnums=(0, 1, 2), static_argnames="due")
    def step(parameters: Any, inner_state: Any, outer_state: Any, rows: jax.Array, due: tuple[int, ...]) -> Any:
        gradients = jax.grad(loss_of)(parameters, rows)  # of this cluster's rows
        updates, inner_state = inner.update(gradients, inner_state, parameters)
        parameters, outer_state = outer.apply_updates(parameters, updates, outer_state, due)
        return parameters, inner_state, outer_state

    def load(index: int) -> jax.Array:
        """This cluster's rows of a global batch, on its own devices."""
        first = world.clusters[world.cluster].first_rank * ROWS_PER_DEVICE
        mine = text.rows(index, first, first + mesh.size * ROWS_PER_DEVICE)
        return jax.make_array_from_callback(mine.shape, split, lambda where: mine[where])

    evaluate, held_out = jax.jit(loss_of), load(given.steps)
    for index in range(given.steps):
        due = outer.due(index)  # on most steps nothing: a program without an exchange
        parameters, inner_state, outer_state = step(parameters, inner_state, outer_state, load(index), due=due)
        jax.block_until_ready(parameters)  # JAX on CPU can deadlock with many steps in flight
        if (index + 1) % given.every == 0:
            # The clusters' compilers may have rounded the outer optimizer's update differently; then the first one's counts.
            outer_state = outer_state._replace(anchor=hetccl.check_replicas(outer_state.anchor, resync=True))
            loss = float(evaluate(outer_state.anchor, held_out))  # in every process: it is the whole cluster's program
            if world.rank_of_device(jax.local_devices()[0]) == 0:
                print(f"step {index + 1:4d}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
