"""``hetccl.check_replicas``: whether all clusters hold the same values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_hetccl import session
from jax_hetccl._broadcast import broadcast, described, named_leaves
from jax_hetccl._errors import MismatchError


def check_replicas(tree: Any, resync: bool = False) -> Any:
    """Checks that every cluster holds the same bits, however they are sharded.

    Computes 64-bit checksums on the devices and compares them over the control plane; no array is moved. Call it in
    every process, outside of ``jit``, from time to time.

    Args:
      tree: arrays of the same paths, global shapes and dtypes in every cluster.
      resync: where they differ, give everybody the first cluster's values instead of raising.

    Returns:
      The tree; the first cluster's if it had to be resynchronised.

    Raises:
      MismatchError: the clusters differ; names the first leaf that does and who has which checksum. With ``resync``
        only if they differ in paths, shapes or dtypes.
      UnsupportedError: inside ``jit``.

    Example:
      >>> hetccl.check_replicas(params)
    """
    world = session.hooks().world
    names, leaves, _ = named_leaves("check_replicas", tree)
    types = [described(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    answers = world.control.meet("replicas", [types, [checksums(x) for x in leaves]], world.config.arrival_timeout)
    said = [(world.control.members[m].name, v) for m, v in sorted(answers.items())]
    if (found := first_difference([(name, [(t,) for t in types]) for name, (types, _) in said])) is not None:
        raise MismatchError(f"check_replicas: {found}. The trees must have the same paths, shapes and dtypes.")
    found = first_difference(
        [(name, [(t, *sums) for t, sums in zip(types, every, strict=True)]) for name, (types, every) in said]
    )
    if found is None:
        return tree
    if not resync:
        raise MismatchError(
            f"check_replicas: {found}. hetccl.check_replicas(tree, resync=True) copies the first cluster's."
        )
    return broadcast(tree, root=0)


def first_difference(said: list[tuple[str, list[tuple[str, ...]]]]) -> str | None:
    """The first leaf of which not everybody says the same: for each process, (type, checksums...) of its leaves. More
    than one checksum is a difference between the replicas of one process."""
    for i in range(max(len(leaves) for _, leaves in said)):
        found: dict[tuple[str, ...], list[str]] = {}
        for name, leaves in said:
            found.setdefault(leaves[i] if i < len(leaves) else ("no leaf",), []).append(name)
        if len(found) > 1 or len(next(iter(found))) > 2:
            which = next(leaf[0] for leaf in found if leaf[0] != "no leaf").rsplit(" ", 1)[0]
            texts = [f"{leaf[0]} {', '.join(leaf[1:])}".strip() for leaf in found]
            who = [", ".join(names) for names in found.values()]
            return f"leaf {which} differs: " + "; ".join(f"{t} in {w}" for t, w in zip(texts, who, strict=True))
    return None


def checksums(leaf: Any) -> list[str]:
    """The checksum of a leaf's value; several if this process's replicas differ."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if isinstance(x.sharding, NamedSharding):  # explicit axes have rules of their own for what may be added to what
        mesh = x.sharding.mesh
        assert isinstance(mesh, Mesh)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        shards = [s.data for s in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), shards)
    high, low = _digest(x)
    pairs = zip(high.addressable_shards, low.addressable_shards, strict=True)
    found = {(int(np.asarray(a.data)) << 32) | int(np.asarray(b.data)) for a, b in pairs}
    return [f"{number:016x}" for number in sorted(found)]


@jax.jit
def _digest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sums, modulo 2**32, of hashes of every element's bits and place: the same for every sharding."""
    place = jnp.zeros(x.shape, np.uint32)
    for d in range(x.ndim):
        place = _mixed(place * np.uint32(31) + lax.broadcasted_iota(np.uint32, x.shape, d) + np.uint32(d + 1))
    total = [jnp.zeros((), np.uint32)] * 2
    for n, word in enumerate(_words(x)):
        hashed = _mixed(word ^ _mixed(place + np.uint32(n + 1)))
        again = _mixed(hashed + np.uint32(0x9E3779B9) ^ place)
        total = [t + jnp.sum(h, dtype=np.uint32) for t, h in zip(total, (hashed, again), strict=True)]
    return total[0], total[1]


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of every element as 32-bit words."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(np.uint32)]
    if jnp.issubdtype(x.dtype, jnp.integer):
        if x.dtype.itemsize < 8:
            return [x.astype(np.int32).view(np.uint32) if x.dtype.itemsize < 4 else x.view(np.uint32)]
        return list(jnp.moveaxis(lax.bitcast_convert_type(x, np.uint32), -1, 0))
    if x.dtype.itemsize == 8:
        return list(jnp.moveaxis(lax.bitcast_convert_type(x, np.uint32), -1, 0))
    bits = jnp.finfo(x.dtype).bits
    if bits < 8:
        return [lax.bitcast_convert_type(x.astype(np.float32), np.uint32)]
    return [lax.bitcast_convert_type(x, np.dtype(f"uint{bits}")).astype(np.uint32)]


def _mixed(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
