"""Facts about JAX's state, and taking ``jax.distributed`` out of the way."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
from jax._src import config, core, distributed, xla_bridge
from jax._src import mesh as mesh_lib


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes along which a value's type says that it varies; empty with ``check_vma=False``."""
    return frozenset(core.typeof(x).manual_axis_type.varying)


def checks_vma() -> bool:
    """Whether the surrounding shard_map tracks along which axes values vary."""
    return bool(config._check_vma.value)


def concrete_mesh() -> jax.sharding.Mesh | None:
    """The mesh that ``jax.set_mesh`` put in force, if any."""
    mesh = mesh_lib.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def removes_size_one_axes() -> bool:
    """Whether JAX drops axes of local size 1 from types, which would drop a one-device cluster's collectives."""
    return bool(config.remove_size_one_mesh_axis_from_type.value)


def uses_shardy() -> bool:
    """Whether programs are partitioned by Shardy; the ordering pass knows its regions only."""
    return bool(config.use_shardy_partitioner.value)


def devices_in_use() -> bool:
    """Whether JAX has opened its devices, after which their drivers read no environment any more."""
    return bool(xla_bridge.backends_are_initialized())


def abandon_distributed() -> None:
    """Takes ``jax.distributed`` out of the way of an end of this process whose cluster has lost a process.

    At exit JAX waits for all processes of the cluster, 100 s for a dead one, and then aborts. The objects are leaked on
    purpose: destroying them waits too.
    """
    state = distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        owned = getattr(state, name)
        if owned is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))
            setattr(state, name, None)
