"""``hetccl.Snapshots``: the last steps of a training, to go on from after a loss."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl import session
from jax_hetccl._broadcast import broadcast, described, named_leaves
from jax_hetccl._errors import ConfigError, HetcclError, MismatchError
from jax_hetccl._replicas import checksums, first_difference
from jax_hetccl._world import World
from jax_hetccl.resuming import dropped, resumption

Where = Literal["host", "device", "reference"]

_log = logging.getLogger(__name__)

# Gives a leaf back as an array of its own, which the program may donate.
_Restore = Callable[[], Any]


class Snapshots:
    """The state after the last steps, kept in this process, and the step on which all clusters agree.

    A step that takes something from every cluster (a gradient's mean) ends nowhere before every cluster has begun it.
    With :meth:`keep` after each step the clusters are one kept step apart at most when one of them dies, so that two
    kept ones hold a common one. Make one object in each process, before the first world's end and for all that follow.

    Cost of a kept step: it waits for the state, and copies this process's part of it, each replica once: to the host
    (a GPU's PCIe link, or one copy of memory on CPUs), or on the device, which takes ``depth`` times the state's size there.
    Nothing is sent. ``every`` thins it out.

    Args:
      every: keep steps whose number this divides; a loss costs ``every`` steps at most, and the one under way.
      depth: how many kept steps to hold. More than two only where clusters run ahead of each other (pipelines).
      where: ``"host"`` or ``"device"``: copies there, which outlive donation. ``"reference"``: the arrays themselves,
        which costs nothing, for programs that donate none of them.

    Raises:
      ConfigError: a wrong argument.

    Example:
      >>> snapshots = hetccl.Snapshots()
      >>> step, state = snapshots.resume(state)  # at a start (0, the first cluster's), after a loss the agreed step
      >>> while step < 1000:
      ...     state = train(state, batches[step])
      ...     step += 1
      ...     snapshots.keep(step, state)
    """

    def __init__(self, every: int = 1, depth: int = 2, where: Where = "host") -> None:
        if every < 1 or depth < 2:
            raise ConfigError(f"Snapshots(every={every}, depth={depth}): every must be 1 at least, and depth 2")
        if where not in _KEEPERS:
            raise ConfigError(f"Snapshots(where={where!r}): expected one of {', '.join(_KEEPERS)}")
        self._every, self._depth, self._keeper = every, depth, _KEEPERS[where]
        self._kept: dict[int, _Kept] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held, oldest first."""
        return tuple(sorted(self._kept))

    def keep(self, step: int, tree: Any) -> bool:
        """Keeps the state after a step, if ``every`` divides it. Call it in every process, before the next step begins.

        Args:
          step: how many steps the state has behind it; grows from call to call.
          tree: arrays with any sharding, or values that ``jnp.asarray`` takes.

        Returns:
          Whether it was kept.

        Raises:
          HetcclError: the world has failed; what a failed step left behind is not kept.
          ConfigError: a step that is not behind the last kept one.
          UnsupportedError: inside ``jit``.
        """
        if step % self._every:
            return False
        if self._kept and step <= max(self._kept):
            raise ConfigError(f"keep: step {step} comes after step {max(self._kept)}; steps must grow")
        world = session.hooks().world
        names, leaves, _ = named_leaves("Snapshots.keep", tree)
        jax.block_until_ready(leaves)
        world.check()  # on a GPU a failed exchange shows as NaN in its own step and raises in the next one only
        self._hold(step, names, leaves)
        return True

    def resume(self, tree: Any) -> tuple[int, Any]:
        """The step to go on from and the state after it, the same bits in every cluster.

        Call it in every process behind every ``initialize`` and ``reinitialize``. Nobody holds a step at a start: then it is
        0 and the first cluster's tree, by ``broadcast``. After a loss it is the last step that all hold. Clusters that hold none
        while others do have come back, and get the tree by ``broadcast``; so do all if the checksums of what they hold differ,
        as updates that different compilers have rounded do.

        Args:
          tree: the initial state; its values count only where this process holds no step, and elsewhere it may have been
            donated. The same paths, shapes and dtypes everywhere.

        Returns:
          Step and state. The step is held from now on; later ones are not any more.

        Raises:
          AgreementError: there is no step that all hold; says who holds what.
          MismatchError: the trees differ in paths, shapes or dtypes; names the leaf.
          HetcclError: the world has failed.
        """
        world = session.hooks().world
        world.check()
        said = world.control.meet("snapshots", list(self.steps), world.config.arrival_timeout)
        members = world.control.members
        found = resumption([(members[m].name, members[m].cluster, steps) for m, steps in sorted(said.items())])
        if found.step is None:
            tree = broadcast(tree, root=0)
            self._hold(0, *named_leaves("Snapshots.resume", tree)[:2])
            return 0, tree
        if self._kept:
            self._kept = {step: kept for step, kept in self._kept.items() if step <= found.step}
            tree = self._kept[found.step].restored(tree)
        same = self._agree(world, found.step, tree)
        if found.new or not same:
            tree = broadcast(tree, root=found.root)
            if not (self._kept and same):
                self._kept = {}
                self._hold(found.step, *named_leaves("Snapshots.resume", tree)[:2])
        return found.step, tree

    def _hold(self, step: int, names: Sequence[str], leaves: Sequence[Any]) -> None:
        # The oldest goes first: there is no moment with more than `depth` copies of the state.
        for old in dropped({**self._kept, step: None}, self._depth):
            del self._kept[old]
        self._kept[step] = _Kept(step, tuple(names), tuple(self._keeper(leaf) for leaf in leaves))

    def _agree(self, world: World, step: int, tree: Any) -> bool:
        """Whether all that hold the step hold the same bits. Raises if their trees are not of one kind."""
        mine = None
        if self._kept:
            names, leaves, _ = named_leaves("Snapshots.resume", tree)
            mine = [[described(n, x), *checksums(x)] for n, x in zip(names, leaves, strict=True)]
        said = world.control.meet("snapshots/sums", mine, world.config.arrival_timeout)
        held = [(world.control.members[m].name, list(map(tuple, v))) for m, v in sorted(said.items()) if v is not None]
        if (
            difference := first_difference([(name, [leaf[:1] for leaf in leaves]) for name, leaves in held])
        ) is not None:
            raise MismatchError(f"resume: after step {step}, {difference}. Keep the same tree everywhere.")
        if (difference := first_difference(held)) is not None:
            _log.warning("after step %d, %s: all go on from the first cluster's", step, difference)
        return difference is None


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The state after one step."""

    step: int
    names: tuple[str, ...]
    leaves: tuple[_Restore, ...]

    def restored(self, like: Any) -> Any:
        paths, treedef = jax.tree.flatten_with_path(like)
        names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
        if names != self.names:
            raise ConfigError(
                f"resume: the tree has the leaves {', '.join(names) or 'x'}, but after step {self.step} "
                f"{', '.join(self.names) or 'x'} were kept; pass a tree of the same structure"
            )
        return jax.tree.unflatten(treedef, [restore() for restore in self.leaves])


def _as_it_is(leaf: Any) -> _Restore:
    def restore() -> Any:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise HetcclError("resume: a kept array was donated; use Snapshots(where='host') or where='device'")
        return leaf

    return restore


def _on_host(leaf: Any) -> _Restore:
    if not isinstance(leaf, jax.Array):
        value = np.array(jnp.asarray(leaf))  # what a cluster that gets it by broadcast has
        return lambda: jnp.array(value)
    if _is_key(leaf):
        return _wrapping(leaf, _on_host(jax.random.key_data(leaf)))
    parts: dict[Any, np.ndarray] = {}
    for shard in leaf.addressable_shards:
        if (place := _place(shard.index)) not in parts:  # replicas once
            parts[place] = np.array(shard.data)
    shape, sharding, committed = leaf.shape, leaf.sharding, leaf.committed

    def restore() -> jax.Array:
        # Copies, as JAX may use an array of numpy's in place, and the program may donate what it gets.
        if not committed:
            return jnp.array(next(iter(parts.values())))
        return jax.make_array_from_callback(shape, sharding, lambda index: parts[_place(index)].copy())

    return restore


def _on_device(leaf: Any) -> _Restore:
    if not isinstance(leaf, jax.Array):
        return _on_host(leaf)
    if _is_key(leaf):
        return _wrapping(leaf, _on_device(jax.random.key_data(leaf)))
    kept = _copied(leaf)
    return lambda: _copied(kept)


def _copied(array: jax.Array) -> jax.Array:
    """Shard by shard: a program over the whole array would need all processes of the cluster."""
    if not array.committed:
        return jnp.copy(array)
    shards = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _wrapping(leaf: jax.Array, restore: _Restore) -> _Restore:
    impl = jax.random.key_impl(leaf)
    return lambda: jax.random.wrap_key_data(restore(), impl=impl)


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


_KEEPERS: Mapping[Where, Callable[[Any], _Restore]] = {"host": _on_host, "device": _on_device, "reference": _as_it_is}


def _place(index: Sequence[slice] | None) -> tuple[tuple[Any, ...], ...]:
    return tuple((part.start, part.stop, part.step) for part in index or ())
