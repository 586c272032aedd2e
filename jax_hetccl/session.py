"""From ``initialize`` to ``shutdown``: the world, and JAX with the hooks of its spanning axes."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import jax

from jax_hetccl import _compat, _native, island
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
