"""The operation that JAX sees: the identity in shape and sharding, with a per-device program of its own.

Inside ``jit`` nobody knows how an array is sharded before the partitioner has decided. It asks us then, through
``custom_partitioning``, and takes the :class:`~jax_hetccl.syncing.shard.Shard` that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_hetccl import _compat
from jax_hetccl._errors import HetcclError
from jax_hetccl._world import World
from jax_hetccl.syncing.agree import Layout, Syncs
from jax_hetccl.syncing.shard import DEVICES, Shard
from jax_hetccl.syncing.spec import Spec

# The name of a sync's primitive, and of its function in lowered programs.
OPERATION = "hetccl_sync"


def operation(world: World, syncs: Syncs, spec: Spec) -> Callable[..., Any]:
    """Makes the function of a sync: ``(*arrays) -> list of arrays``, to be called in ``jit``.

    A gather has a result for each cluster, in order, for the first array, then for the second, and so on.

    Args:
      world: the world.
      syncs: learns the layouts.
      spec: the sync.
    """

    def alone(devices: Sequence[Any], *arrays: Any) -> Any:
        """The program of a single device."""
        layout = Layout(
            (world.rank_of_device(devices[0]),), tuple((tuple((0, n) for n in i.shape),) for i in spec.arrays)
        )
        syncs.settle(spec, layout)
        return Shard(spec, layout, world.cluster)(*arrays)

    @custom_partitioning
    def combine(*arrays: Any) -> Any:
        results = [(0, np.dtype(np.uint32))]
        results += [(1 + n, i.result) for n, i in enumerate(spec.items) for _ in range(spec.copies)]
        return _compat.on_one_device(alone, spec.text, tuple(results), *arrays)

    def partition(_: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        devices = _compat.devices_of(arg_shapes[0].sharding)
        mesh = Mesh(np.asarray(devices), (DEVICES,))
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = [_even(s, replicated) for s in arg_shapes[1:]]
        boxes = tuple(_boxes(s, i.shape, devices) for s, i in zip(shardings, spec.arrays, strict=True))
        layout = Layout(tuple(world.rank_of_device(d) for d in devices), boxes)
        try:
            layout, shardings = syncs.settle(spec, layout, shardings)
        except HetcclError as error:
            syncs.keep_error(error)
            raise
        results = [replicated, *(s for s in shardings[: len(spec.items)] for _ in range(spec.copies))]
        return mesh, Shard(spec, layout, world.cluster), results, (replicated, *shardings)

    def rule(*_: Any) -> SdyShardingRule:
        chain = ArrayMapping("chain")
        mappings = [ArrayMapping(*(f"a{i}d{d}" for d in range(len(x.shape)))) for i, x in enumerate(spec.arrays)]
        results = [m for m in mappings[: len(spec.items)] for _ in range(spec.copies)]
        return SdyShardingRule((chain, *mappings), (chain, *results))

    combine.def_partition(partition, sharding_rule=rule, decode_shardings=False)

    def sync(*arrays: Any) -> Any:
        chain, *combined = combine(_compat.chain_begin(), *arrays)
        return _compat.chain_end(chain, combined, spec.key)

    sync.__name__ = OPERATION
    return jax.jit(sync)


def _even(shape: Any, replicated: NamedSharding) -> Any:
    """The array's sharding, or replication if it does not divide the array evenly."""
    if shape.sharding is None:
        return replicated
    try:
        shape.sharding.shard_shape(shape.shape)
    except ValueError:
        return replicated
    return shape.sharding


def _boxes(sharding: Any, shape: tuple[int, ...], devices: Sequence[Any]) -> tuple[Any, ...]:
    where = sharding.devices_indices_map(shape)
    return tuple(tuple(s.indices(n)[:2] for s, n in zip(where[d], shape, strict=True)) for d in devices)
