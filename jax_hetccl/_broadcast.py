"""Equal parameters everywhere: one cluster's pytree for all."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_hetccl import session
from jax_hetccl._errors import AgreementError, ConfigError, UnsupportedError
from jax_hetccl.agreement import WORLD_AXIS, world_mesh
from jax_hetccl.decompose.common import unpacked
from jax_hetccl.exchange import fingerprint


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
      UnsupportedError: inside ``jit``; or a leaf is sharded without a mesh, in any process: everybody gets the error.
      AgreementError: the trees or roots of two processes differ; names the first leaf that does. Nothing was moved.

    Example:
      >>> params = hetccl.broadcast(params)
    """
    world = session.hooks().world
    clusters = [c.name for c in world.clusters]
    index = clusters.index(root) if root in clusters else root
    if not isinstance(index, int) or not 0 <= index < len(clusters):
        raise ConfigError(
            f"broadcast: no cluster {root!r}; the clusters are {', '.join(clusters)} (0 to {len(clusters) - 1})"
        )
    names, leaves, treedef = named_leaves("broadcast", tree)
    batches, name = _agreed(names, leaves, index)
    sharded = {i for batch in batches for i in batch}
    results: list[Any] = [None] * len(leaves)
    mesh = world_mesh()
    whole = []
    for i, leaf in enumerate(leaves):
        if math.prod(np.shape(leaf)) == 0 and i not in sharded:  # moves nothing; jax 0.11's CPU compiler crashes
            results[i] = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        elif i not in sharded:
            whole.append(i)
    if whole:
        everywhere = NamedSharding(mesh, PartitionSpec())
        inputs = [_replicated(_host_value(leaves[i]), everywhere) for i in whole]
        outputs = _program(mesh)(jnp.int32(world.clusters[index].first_rank), inputs)
        for i, out in zip(whole, outputs, strict=True):
            results[i] = _like(leaves[i], out)
    for batch in batches:
        found = _by_shards([leaves[i] for i in batch], [names[i] for i in batch], index == world.cluster, name)
        for i, out in zip(batch, found, strict=True):
            results[i] = out
    return jax.tree.unflatten(treedef, results)


def _agreed(names: list[str], leaves: list[Any], root: int) -> tuple[list[list[int]], str]:
    """Which leaves are sharded in some cluster, in batches for one program each, and a name for the shardings of all
    clusters together. All processes raise, or none."""
    world = session.hooks().world
    mine = [i for i, x in enumerate(leaves) if _is_sharded(x)]
    homeless = [i for i in mine if not isinstance(leaves[i].sharding, NamedSharding)]
    said = world.control.meet(
        "broadcast",
        {
            "items": [described(name, leaf) for name, leaf in zip(names, leaves, strict=True)],
            "root": world.clusters[root].name,
            "refused": [f"leaf {names[i] or 'x'} has the sharding {leaves[i].sharding}" for i in homeless],
            "sharded": mine,
            "layouts": fingerprint([(i, str(leaves[i].sharding)) for i in mine]),
            "meshes": len({leaves[i].sharding.mesh for i in mine if i not in homeless}),
        },
        world.config.arrival_timeout,
    )
    members = {m: world.control.members[m].name for m in said}
    here = world.control.me
    for member, theirs in said.items():
        if (found := _difference(said[here], theirs, members[here], members[member])) is not None:
            raise AgreementError(f"broadcast: {found}. Nothing was moved.")
    refused = [f"{text} in {members[m]}" for m, theirs in said.items() for text in theirs["refused"]]
    if refused:
        raise UnsupportedError(f"broadcast: {'; '.join(refused)}: shard it over a mesh. Nothing was moved.")
    sharded = sorted({i for theirs in said.values() for i in theirs["sharded"]})
    # A process names its sharding in its own way, so each cluster's first counts.
    first = {m.cluster: m.index for m in reversed(world.control.members)}
    one_program = all(theirs["meshes"] <= 1 for theirs in said.values())  # jit takes arrays of one mesh
    batches = [[i] for i in sharded] if not one_program else [sharded] if sharded else []
    return batches, f"broadcast {fingerprint([said[first[c]]['layouts'] for c in sorted(first)]):016x}"


def _difference(ours: Any, theirs: Any, here: str, there: str) -> str | None:
    """What two processes want to broadcast differently, first difference first."""
    pairs = [("root=" + ours["root"], "root=" + theirs["root"])]
    pairs += itertools.zip_longest(ours["items"], theirs["items"], fillvalue="no leaf")
    return next((f"{a} in {here}, but {b} in {there}" for a, b in pairs if a != b), None)


def named_leaves(op: str, tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths, leaves and structure of an operation's argument; an error if the operation, which works on values,
    stands inside a program."""
    paths, treedef = jax.tree.flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    for name, (_, leaf) in zip(names, paths, strict=True):
        if isinstance(leaf, Tracer):
            raise UnsupportedError(
                f"{op}: {name or 'the argument'} is being traced; call hetccl.{op} outside of jit, on arrays. Inside, "
                "hetccl.sync combines the clusters' arrays."
            )
    return names, [leaf for _, leaf in paths], treedef


def described(name: str, leaf: Any) -> str:
    """A leaf's path and type, the same for every way to shard it."""
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.asarray(leaf).dtype
    return f"{name or 'x'} {dtype.name}[{','.join(map(str, np.shape(leaf)))}]"


def _by_shards(leaves: list[Any], names: list[str], is_root: bool, name: str) -> list[Any]:
    """Broadcasts arrays of which each device sends and receives its own shards."""
    combiner = session.hooks().combiner
    mesh = next((x.sharding.mesh for x in leaves if _is_sharded(x)), world_mesh())
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [x if _is_sharded(x) else _replicated(_host_value(x), everywhere) for x in leaves]
    keys = [jax.random.key_data(x) if _is_key(x) else x for x in placed]

    def keep_root(mine: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        split = [_to_bits(x) for x in arrays]
        bits = [jnp.where(mine, b, jnp.zeros_like(b)) for part in split for b in part]
        paths = [path for path, part in zip(names, split, strict=True) for _ in part]
        found = iter(combiner.combine("sum", paths, bits, None, name))
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
    x = x.astype(unpacked(x.dtype))
    return [jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))]


def _from_bits(bits: list[jax.Array], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return jax.lax.complex(_from_bits(bits[:1], part), _from_bits(bits[1:], part))
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return bits[0].astype(dtype)
    return jax.lax.bitcast_convert_type(bits[0], unpacked(dtype)).astype(dtype)


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
