"""Equal parameters everywhere: one cluster's pytree for all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_hetccl import session
from jax_hetccl._errors import ConfigError, UnsupportedError
from jax_hetccl.agreement import WORLD_AXIS, world_mesh


def broadcast(tree: Any, root: int | str = 0) -> Any:
    """Gives every process the pytree of one cluster, bit for bit.

    Call it once before training, in every process: initialisers may differ between vendors, and so may seeds.
    It moves as many bytes as a sum of the tree.

    Args:
      tree: arrays of the same shapes and dtypes in every cluster. Leaves are replicated over their cluster, or sharded
        over devices of one process.
      root: the cluster to copy from, by index or name. Of a cluster of several processes, its first device counts.

    Returns:
      The root's values with this process's shardings.

    Raises:
      ConfigError: there is no cluster ``root``.
      UnsupportedError: a leaf is sharded over several processes.

    Example:
      >>> params = hetccl.broadcast(params)
    """
    world = session.hooks().world
    names = [c.name for c in world.clusters]
    index = names.index(root) if root in names else root
    if not isinstance(index, int) or not 0 <= index < len(names):
        raise ConfigError(
            f"broadcast: no cluster {root!r}; the clusters are {', '.join(names)} (0 to {len(names) - 1})"
        )
    leaves, treedef = jax.tree.flatten(tree)
    mesh = world_mesh()
    everywhere = NamedSharding(mesh, PartitionSpec())
    inputs = [_replicated(_host_value(leaf), everywhere) for leaf in leaves]
    outputs = _program(mesh)(jnp.int32(world.clusters[index].first_rank), inputs) if inputs else []
    return jax.tree.unflatten(treedef, [_like(leaf, out) for leaf, out in zip(leaves, outputs, strict=True)])


@functools.lru_cache(maxsize=1)
def _program(mesh: jax.sharding.Mesh) -> Any:
    def keep_root(root: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        mine = jax.lax.axis_index(WORLD_AXIS) == root
        # One rank contributes its bits and all others zeros: an integer sum that is exact for every value.
        bits = [[jnp.where(mine, b, jnp.zeros_like(b)) for b in _to_bits(x)] for x in leaves]
        return [_from_bits(b, x.dtype) for b, x in zip(jax.lax.psum(bits, WORLD_AXIS), leaves, strict=True)]

    spec = PartitionSpec()
    return jax.jit(jax.shard_map(keep_root, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _to_bits(x: jax.Array) -> list[jax.Array]:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_to_bits(x.real), *_to_bits(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint8)]
    if jnp.issubdtype(x.dtype, jnp.integer):
        return [x.astype(jnp.int8) if jnp.iinfo(x.dtype).bits < 8 else x]
    return [jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))]


def _from_bits(bits: list[jax.Array], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return jax.lax.complex(_from_bits(bits[:1], part), _from_bits(bits[1:], part))
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return bits[0].astype(dtype)
    return jax.lax.bitcast_convert_type(bits[0], dtype)


def _host_value(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _host_value(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            raise UnsupportedError(
                f"broadcast: a leaf of shape {leaf.shape} is sharded over several processes of this cluster "
                f"({leaf.sharding}); broadcast replicated values, before sharding them"
            )
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)


def _replicated(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # From each process's own value: device_put would insist that all processes have the same one.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _like(leaf: Any, out: jax.Array) -> Any:
    """The result with the leaf's placement."""
    value = out.addressable_data(0)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(value)), impl=jax.random.key_impl(leaf))
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return jnp.asarray(np.asarray(value))
    if leaf.is_fully_addressable:
        return jax.device_put(value, leaf.sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])
