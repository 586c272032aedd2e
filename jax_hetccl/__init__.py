"""jax_hetccl: one JAX training job over accelerators of several vendors.

    import jax_hetccl as hetccl

    hetccl.initialize(axes=("data",))   # in every process of every cluster
    ...
    loss = hetccl.pmean(loss, "data")   # inside shard_map; jax.lax.pmean means the same here

Inside a cluster the vendor's own collectives move the data; between clusters exchanges do. See README.md.
"""

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
from jax_hetccl.broadcast import broadcast
from jax_hetccl.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    local,
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
from jax_hetccl.session import initialize, make_mesh, shutdown
from jax_hetccl.spanning import sharded_cotangents
from jax_hetccl.world import World, check, world

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ConfigError",
    "ExchangeTimeoutError",
    "HetcclError",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
    "UnsupportedError",
    "World",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "check",
    "initialize",
    "local",
    "make_mesh",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "recv",
    "send",
    "sharded_cotangents",
    "shutdown",
    "world",
]
