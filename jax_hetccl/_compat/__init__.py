"""The only place that knows JAX's private names.

Everything else sees the small interface below: :func:`install` puts the hooks of a spanning axis into JAX's tracing
and lowering, :class:`Lowering` is one equation being lowered, ``ir`` and ``hlo`` are jaxlib's MLIR bindings.
``tests/test_compat.py`` checks every private name on its own, so that a JAX release that moves one says which.

Supported: jax 0.10 to 0.12 (0.10.2 and 0.12.0.1 are tested).
"""

import os

from jax._src import source_info_util
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect
from jax._src.lib.mlir.dialects import hlo, sdy

from jax_hetccl._compat.base import AnyMesh
from jax_hetccl._compat.combining import Combination, collecting_primitive, combining_primitive
from jax_hetccl._compat.communication import Placed, communicating_primitive
from jax_hetccl._compat.emit import (
    CHAIN_BEGIN,
    CHAIN_END,
    COLLECTIVE_CHANNEL,
    DEVICE_TO_DEVICE,
    LOWERED_BEGIN,
    LOWERED_END,
    MARKERS,
    PARTITIONED,
    REGION_BEGIN,
    REGION_END,
    constant,
    custom_call,
)
from jax_hetccl._compat.facts import (
    abandon_distributed,
    checks_vma,
    concrete_mesh,
    devices_in_use,
    removes_size_one_axes,
    uses_shardy,
    varying_axes,
)
from jax_hetccl._compat.hooks import Hooks
from jax_hetccl._compat.install import install, uninstall
from jax_hetccl._compat.lowering import Lowering, is_byte_float
from jax_hetccl._compat.per_device import (
    chain_begin,
    chain_end,
    devices_of,
    local_gather,
    local_index,
    local_max,
    on_one_device,
)
from jax_hetccl._compat.tracing import in_local, local

# Our wrappers are no place in the user's program: JAX leaves their frames out of the locations it keeps.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)

__all__ = [
    "CHAIN_BEGIN",
    "CHAIN_END",
    "COLLECTIVE_CHANNEL",
    "DEVICE_TO_DEVICE",
    "LOWERED_BEGIN",
    "LOWERED_END",
    "MARKERS",
    "PARTITIONED",
    "REGION_BEGIN",
    "REGION_END",
    "AnyMesh",
    "Combination",
    "Hooks",
    "Lowering",
    "Placed",
    "abandon_distributed",
    "chain_begin",
    "chain_end",
    "checks_vma",
    "collecting_primitive",
    "combining_primitive",
    "communicating_primitive",
    "concrete_mesh",
    "constant",
    "custom_call",
    "devices_in_use",
    "devices_of",
    "func_dialect",
    "hlo",
    "in_local",
    "install",
    "ir",
    "is_byte_float",
    "local",
    "local_gather",
    "local_index",
    "local_max",
    "on_one_device",
    "removes_size_one_axes",
    "sdy",
    "uninstall",
    "uses_shardy",
    "varying_axes",
]
