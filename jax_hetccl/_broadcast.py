"""Equal parameters everywhere: one cluster's pytree for all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_hetccl import session
from jax_hetccl._errors import AgreementError, ConfigError, UnsupportedError
from jax_hetccl.agreement import WORLD_AXIS, world_mesh
from jax_hetccl.exchange import fingerprint
from jax_hetccl.syncing.combine import combine


def broadcast(tree: Any, root: int | str = 0) -> Any:
    """Gives every process the pytree of one cluster, bit for bit.

    Call it once before training, in every process: initialisers may differ between vendors, and so may seeds.
    It moves as many bytes as a sum of the tree.

    Args:
      tree: arrays of the same shapes and dtypes in every cluster, with any sharding. What is sharded, in any cluster,
        is sharded over all devices of that cluster.
      root: the cluster to copy from, by index or name. Of its replicas of an array that no cluster shards, that on its
        first device counts; other replicas must be equal.

    Returns:
      The root's values with this process's shardings.

    Raises:
      ConfigError: there is no cluster ``root``.
      UnsupportedError: a leaf is sharded without a mesh.
      AgreementError: the clusters' trees differ.

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
    paths, treedef = jax.tree.flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    batches, name = _agreed(leaves)
    sharded = {i for batch in batches for i in batch}
    results: list[Any] = [None] * len(leaves)
    mesh = world_mesh()
    whole = [i for i in range(len(leaves)) if i not in sharded]
    if whole:
        everywhere = NamedSharding(mesh, PartitionSpec())
        inputs = [_replicated(_host_value(leaves[i]), everywhere) for i in whole]
        outputs = _program(mesh)(jnp.int32(world.clusters[index].first_rank), inputs)
        for i, out in zip(whole, outputs, strict=True):
            results[i] = _like(leaves[i], out)
    for batch in batches:
        names = [jax.tree_util.keystr(paths[i][0]) for i in batch]
        found = _by_shards([leaves[i] for i in batch], names, index == world.cluster, name)
        for i, out in zip(batch, found, strict=True):
            results[i] = out
    return jax.tree.unflatten(treedef, results)


def _agreed(leaves: list[Any]) -> tuple[list[list[int]], str]:
    """Which leaves are sharded in some cluster, in batches for one program each, and a name for the shardings of all
    clusters together."""
    world = session.hooks().world
    mine = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.is_fully_replicated]
    layouts = fingerprint([(i, str(leaves[i].sharding)) for i in mine])
    for i in mine:
        if not isinstance(leaves[i].sharding, NamedSharding):
            raise UnsupportedError(f"broadcast: leaf {i} has the sharding {leaves[i].sharding}; shard it over a mesh")
    meshes = len({leaves[i].sharding.mesh for i in mine})
    said = world.control.meet("broadcast", [mine, layouts, len(leaves), meshes], world.config.arrival_timeout)
    for member, (_, _, number, _) in said.items():
        if number != len(leaves):
            raise AgreementError(
                f"broadcast: the tree has {len(leaves)} leaves here and {number} in {world.control.members[member].name}"
            )
    sharded = sorted({i for theirs, *_ in said.values() for i in theirs})
    # A process names its sharding in its own way, so each cluster's first counts.
    first = {m.cluster: m.index for m in reversed(world.control.members)}
    one_program = all(number <= 1 for *_, number in said.values())  # jit takes arrays of one mesh
    batches = [[i] for i in sharded] if not one_program else [sharded] if sharded else []
    return batches, f"broadcast {fingerprint([said[first[c]][1] for c in sorted(first)]):016x}"


def _by_shards(leaves: list[Any], names: list[str], is_root: bool, name: str) -> list[Any]:
    """Broadcasts arrays of which each device sends and receives its own shards."""
    hooks = session.hooks()
    mesh = next((x.sharding.mesh for x in leaves if _is_sharded(x)), world_mesh())
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [x if _is_sharded(x) else _replicated(_host_value(x), everywhere) for x in leaves]
    keys = [jax.random.key_data(x) if _is_key(x) else x for x in placed]

    def keep_root(mine: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        split = [_to_bits(x) for x in arrays]
        bits = [jnp.where(mine, b, jnp.zeros_like(b)) for part in split for b in part]
        paths = [path for path, part in zip(names, split, strict=True) for _ in part]
        found = iter(combine(hooks.world, hooks.syncs, "sum", paths, bits, None, name))
        return [_from_bits([next(found) for _ in part], x.dtype) for part, x in zip(split, arrays, strict=True)]

    outs = jax.jit(keep_root, out_shardings=[x.sharding for x in keys])(jnp.asarray(is_root), keys)
    results = []
    for x, out in zip(leaves, outs, strict=True):
        if _is_sharded(x):
            results.append(jax.random.wrap_key_data(out, impl=jax.random.key_impl(x)) if _is_key(x) else out)
        else:
            results.append(_like(x, out))
    return results


def _is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_replicated


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


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
