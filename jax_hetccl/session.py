"""From ``initialize`` to ``shutdown``: the world, and JAX with the hooks of its spanning axes."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_hetccl import _compat, _native, _reform, island
from jax_hetccl import _world as world_lib
from jax_hetccl._errors import HetcclError
from jax_hetccl.spanning import SpanningHooks

_hooks: SpanningHooks | None = None
_registered: set[str] = set()


def initialize(**settings: Any) -> world_lib.World:
    """Joins the world and makes its axes span; see :func:`jax_hetccl._world.initialize` for the settings.

    Call it in every process of every cluster, before the first collective, as one calls
    ``jax.distributed.initialize``. Every setting can come from the environment instead (``HETCCL_*``), which is what
    ``hetccl run`` does.

    Returns:
      The world: its clusters, ranks and this process's place.

    Raises:
      ConfigError: settings are missing or wrong; lists what is valid.
      RendezvousError: the clusters did not meet; says who is missing or was refused.

    Example:
      >>> hetccl.initialize(axes=("data",))
    """
    global _hooks
    if _hooks is not None:
        raise HetcclError("jax_hetccl is initialized already; call hetccl.shutdown() first")
    world = world_lib.initialize(**settings)
    try:
        _register_targets(world.clusters[world.cluster].platform)
        hooks = SpanningHooks(world)
        _compat.install(hooks)
        jax.clear_caches()  # programs traced before know nothing of spanning axes
    except BaseException:
        world_lib.shutdown()
        raise
    _hooks = hooks
    return world


def reinitialize(
    clusters: str | Mapping[str, int] | Sequence[str] | None = None,
    *,
    at_least: int = 1,
    timeout: float | None = None,
) -> world_lib.World:
    """Goes on with other clusters, in the same processes: without those that are lost, or with those that came back.

    Call it in every process of the clusters that go on. Spanning axes have other sizes afterwards, so every program is
    traced and compiled again when it is called next; meshes, arrays and what else belongs to a process stay as they
    are. Where training goes on is what :class:`Snapshots` agrees on.

    * After a loss (any failure of the world) call it without ``clusters``: those left form a world of their own. Needs
      neither the coordinator nor the machine that it ran on.
    * To take in clusters that :func:`waiting_clusters` told of, name them together with those that are there, at the
      same step everywhere.

    Args:
      clusters: the clusters to go on with, as ``"left,third"``, ``"left:1,third:2"``, names or a mapping; the same in
        every process. None: whoever is left.
      at_least: with fewer clusters than this nobody goes on. More than half of the clusters makes sure that only one
        part goes on if the network splits.
      timeout: seconds to wait for the others to call it, ``HETCCL_ARRIVAL_TIMEOUT`` if left out: who has not come then counts as
        lost (or is an error, if ``clusters`` names it). For clusters that came back: seconds to meet them,
        ``HETCCL_JOIN_TIMEOUT`` if left out.

    Returns:
      The new world, with another epoch and other keys. Its ranks are numbered anew.

    Raises:
      HetcclError: there is no world, or nothing is wrong with it and ``clusters`` is left out.
      ConfigError: ``clusters`` names what is not in the job.
      RendezvousError: the others go on without this cluster; fewer than ``at_least`` are left; a named cluster does not
        come. After a loss the failed world is left as it was, and the call may be repeated. Where clusters were to be taken in,
        the present world goes on to work.
      AgreementError: the processes name different clusters.
      PeerLostError: this cluster, or a named one, has lost a process itself: a cluster goes on as a whole or not at all.

    Example:
      >>> try:
      ...     state = jax.block_until_ready(train(state, batch))
      ... except (hetccl.HetcclError, jax.errors.JaxRuntimeError):
      ...     hetccl.reinitialize()  # raises if the world is well, so that the error is the program's own
      ...     step, state = snapshots.resume(state)
    """
    global _hooks
    hooks()
    try:
        world = _reform.reinitialize(clusters, at_least, timeout)
        _compat.uninstall()
        jax.clear_caches()  # programs traced before have the axes' former sizes
        _hooks = SpanningHooks(world)
        _compat.install(_hooks)
    except BaseException:
        if world_lib.current() is None:
            shutdown()
        raise
    return world


def shutdown() -> None:
    """Leaves the world: takes the hooks out of JAX, says goodbye to the peers, joins every thread. Idempotent.

    Programs compiled before raise an error if they are called again.
    """
    global _hooks
    if _hooks is not None:
        _hooks = None
        _compat.uninstall()
        jax.clear_caches()
    world_lib.shutdown()


def hooks() -> SpanningHooks:
    """The hooks in force; an error that names the fix if there is no world."""
    if _hooks is None:
        raise HetcclError("jax_hetccl is not initialized: call hetccl.initialize(axes=(...)) in every process first")
    return _hooks


def make_mesh(axis_shapes: Sequence[int], axis_names: Sequence[str], **kwargs: Any) -> jax.sharding.Mesh:
    """``jax.make_mesh`` over this cluster's devices, agreed with the other clusters at once.

    With plain ``jax.make_mesh`` the clusters agree when they first trace a program over the mesh, which makes the
    first trace wait for the slowest cluster.

    Args:
      axis_shapes: local sizes, as for ``jax.make_mesh``.
      axis_names: names; one of them spans.
      **kwargs: passed on to ``jax.make_mesh``.

    Returns:
      The mesh.

    Raises:
      AgreementError: the clusters' meshes differ in more than the spanning axis' size; names both clusters.

    Example:
      >>> mesh = hetccl.make_mesh((jax.device_count(),), ("data",))
    """
    mesh = jax.make_mesh(tuple(axis_shapes), tuple(axis_names), **kwargs)
    hooks().global_sizes(mesh)
    return mesh


def _register_targets(platform: str) -> None:
    """Registers the custom calls for the platform of this cluster, once in a process."""
    name = island.XLA_PLATFORMS[platform]
    if name not in _registered:
        for target, capsule in _native.registrations(name).items():
            jax.ffi.register_ffi_target(target, capsule, platform=name)
        _registered.add(name)


atexit.register(shutdown)
