"""Data-parallel training over one mesh axis, in stock JAX: `jax.lax.pmean` is all there is.

In a cluster of a larger world the mesh holds the cluster's own devices, the arrays are the cluster's own
part, and the axis may span; nothing here changes for that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .corpus import VOCABULARY, Corpus
from .model import CharTransformer, ModelConfig, next_character_loss

AXIS = "data"
LEARNING_RATE = 3e-3


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of the global batch this JAX world computes.

    Attributes:
        first_rank: global rank of this JAX world's first device.
        rows_per_device: rows of the global batch for each device, the same everywhere.
    """

    first_rank: int
    rows_per_device: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step gave: its global loss and the wall time it took."""

    loss: float
    seconds: float


class Trainer:
    """A model with its optimiser, and the compiled programs that train it.

    Args:
        corpus: text and batches.
        share: this world's rows.
        seed: of the first parameters.
        equalize: applied once to the first parameters, e.g. to make them equal in all clusters.
    """

    def __init__(
        self, corpus: Corpus, share: Share, seed: int = 0, equalize: Callable[[Any], Any] | None = None
    ) -> None:
        self.corpus, self.share = corpus, share
        self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
        model = CharTransformer(ModelConfig(VOCABULARY, corpus.length), rngs=nnx.Rngs(seed))
        graph, first = nnx.split(model)
        first = jax.tree.map(np.asarray, first)  # host values: each process places them on its own devices
        self.parameters = jax.device_put(first, NamedSharding(self.mesh, PartitionSpec()))
        if equalize is not None:
            self.parameters = equalize(self.parameters)
        optimizer = optax.adam(LEARNING_RATE)
        self._state = jax.jit(optimizer.init)(self.parameters)
        self._gradients = build_gradients(self.mesh, graph)
        self._update = build_update(optimizer)

    def run(self, steps: int) -> Iterator[Step]:
        """Trains; yields each step when its loss is known. The first one includes compilation."""
        for step in range(steps):
            start = time.perf_counter()
            loss, gradients = self._gradients(self.parameters, self._rows(step))
            self.parameters, self._state = self._update(self.parameters, self._state, gradients)
            yield Step(float(loss), time.perf_counter() - start)

    def time_reductions(self, repetitions: int, mark: Callable[[str], None]) -> float:
        """Reduces arrays as large as all gradients, and does nothing else.

        Args:
            repetitions: how often.
            mark: called with `reductions start` and `reductions end`, around them.

        Returns:
            The wall time of all of them, in seconds.
        """
        everywhere = PartitionSpec()

        @jax.jit
        @partial(jax.shard_map, mesh=self.mesh, in_specs=everywhere, out_specs=everywhere)
        def reduce(tree: Any) -> Any:
            return jax.lax.pmean(jax.lax.pcast(tree, AXIS, to="varying"), AXIS)

        tree = jax.block_until_ready(reduce(self.parameters))  # compiles
        mark("reductions start")
        start = time.perf_counter()
        for _ in range(repetitions):
            tree = jax.block_until_ready(reduce(tree))
        seconds = time.perf_counter() - start
        mark("reductions end")
        return seconds

    def _rows(self, step: int) -> jax.Array:
        per_device, first = self.share.rows_per_device, self.share.first_rank

        def load(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(per_device * self.mesh.size)
            return self.corpus.rows(step, first * per_device + start, first * per_device + stop)

        shape = (per_device * self.mesh.size, self.corpus.length + 1)
        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, PartitionSpec(AXIS)), load)


def build_gradients(mesh: Mesh, graph: Any) -> Callable[..., Any]:
    """Compiles `(parameters, rows) -> (loss, gradients)`, both means over the whole axis.

    Args:
        mesh: one axis, `AXIS`.
        graph: the model without its parameters, as `flax.nnx.split` gives it.
    """
    everywhere, split = PartitionSpec(), PartitionSpec(AXIS)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, split), out_specs=everywhere)
    def gradients(parameters: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
        def loss_of(parameters: Any) -> jax.Array:
            return next_character_loss(nnx.merge(graph, parameters), rows)

        # Each device differentiates its own rows; one pmean makes the loss and all gradients global.
        own = jax.lax.pcast(parameters, AXIS, to="varying")
        return jax.lax.pmean(jax.value_and_grad(loss_of)(own), AXIS)

    return gradients


def build_update(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Compiles `(parameters, optimiser state, gradients) -> (parameters, optimiser state)`.

    A program of its own: compiled together with the gradients, it would be fused with them in another way for
    another number of devices or by another compiler, and rounded differently. Alone it gives the same bits
    everywhere.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return update


def checksums(tree: Any) -> list[dict[str, str]]:
    """Checksums of every leaf, by its path, for each of this process's devices in order."""
    found: list[dict[str, str]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        for index, shard in enumerate(sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)):
            if index == len(found):
                found.append({})
            data = np.ascontiguousarray(np.asarray(shard.data))
            found[index][name] = hashlib.sha256(data.tobytes()).hexdigest()[:16]
    return found
