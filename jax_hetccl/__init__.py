"""jax_hetccl: one JAX training job over accelerators of several vendors.

    import jax_hetccl as hetccl

    hetccl.initialize(axes=("data",))   # in every process of every cluster
    ...
    loss = hetccl.pmean(loss, "data")   # inside shard_map; jax.lax.pmean means the same here

Inside a cluster the vendor's own collectives move the data; between clusters exchanges do. See README.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_hetccl import optax
    from jax_hetccl._barrier import barrier
    from jax_hetccl._batches import balance, batch_sizes, process_slice, shard_batch
    from jax_hetccl._broadcast import broadcast
    from jax_hetccl._errors import (
        AgreementError,
        ConfigError,
        ExchangeTimeoutError,
        HetcclError,
        MismatchError,
        PeerLostError,
        RendezvousError,
        UnsupportedError,
    )
    from jax_hetccl._reform import waiting_clusters
    from jax_hetccl._replicas import check_replicas
    from jax_hetccl._snapshots import Snapshots
    from jax_hetccl._sync import grad_sync, sync
    from jax_hetccl._world import World, check, world
    from jax_hetccl.collectives import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        local,
        pbroadcast,
        pmax,
        pmean,
        pmin,
        ppermute,
        pshuffle,
        psum,
        psum_scatter,
        pswapaxes,
    )
    from jax_hetccl.p2p import recv, send
    from jax_hetccl.session import initialize, make_mesh, reinitialize, shutdown
    from jax_hetccl.spanning import sharded_cotangents

__version__ = "0.1.0"

# Where each public name lives. Loaded on first use: the command line and the coordinator need no JAX.
_HOMES: dict[str, tuple[str, ...]] = {
    "_errors": (
        "AgreementError",
        "ConfigError",
        "ExchangeTimeoutError",
        "HetcclError",
        "MismatchError",
        "PeerLostError",
        "RendezvousError",
        "UnsupportedError",
    ),
    "_world": ("World", "check", "world"),
    "_broadcast": ("broadcast",),
    "_barrier": ("barrier",),
    "_batches": ("balance", "batch_sizes", "process_slice", "shard_batch"),
    "_reform": ("waiting_clusters",),
    "_replicas": ("check_replicas",),
    "_snapshots": ("Snapshots",),
    "_sync": ("grad_sync", "sync"),
    "collectives": (
        "all_gather",
        "all_to_all",
        "axis_index",
        "axis_size",
        "local",
        "pbroadcast",
        "pmax",
        "pmean",
        "pmin",
        "ppermute",
        "pshuffle",
        "psum",
        "psum_scatter",
        "pswapaxes",
    ),
    "p2p": ("recv", "send"),
    "session": ("initialize", "make_mesh", "reinitialize", "shutdown"),
    "spanning": ("sharded_cotangents",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("optax",)

__all__ = [
    "AgreementError",
    "ConfigError",
    "ExchangeTimeoutError",
    "HetcclError",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
    "Snapshots",
    "UnsupportedError",
    "World",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "balance",
    "barrier",
    "batch_sizes",
    "broadcast",
    "check",
    "check_replicas",
    "grad_sync",
    "initialize",
    "local",
    "make_mesh",
    "optax",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "process_slice",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "recv",
    "reinitialize",
    "send",
    "shard_batch",
    "sharded_cotangents",
    "shutdown",
    "sync",
    "waiting_clusters",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
