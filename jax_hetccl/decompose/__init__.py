"""One file per collective: how it becomes local collectives and exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_hetccl._compat import ir
from jax_hetccl.decompose import alltoall, broadcast, gather, permute, reduce, scatter
from jax_hetccl.decompose.common import Site

Rule = Callable[[Site, ir.Value, dict[str, Any]], ir.Value]

RULES: dict[str, Rule] = {
    "psum": reduce.lower,
    "pmax": reduce.lower,
    "pmin": reduce.lower,
    "all_gather": gather.lower,
    "psum_scatter": scatter.lower,
    "all_to_all": alltoall.lower,
    "ppermute": permute.lower,
    "pbroadcast": broadcast.lower,
}
