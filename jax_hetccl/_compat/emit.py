"""Operations that we emit: markers of the ordering pass, custom calls, constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

COLLECTIVE_CHANNEL, DEVICE_TO_DEVICE = mlir.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE

# Markers that the ordering pass reads and removes.
REGION_BEGIN, REGION_END = "hetccl_region_begin", "hetccl_region_end"
LOWERED_BEGIN, LOWERED_END = "hetccl_lowered_begin", "hetccl_lowered_end"
MARKERS = (REGION_BEGIN, REGION_END, LOWERED_BEGIN, LOWERED_END)

# Markers of the ordering pass: CHAIN_BEGIN stands for the chain at that place; CHAIN_END hands it on (first operand),
# and its further operands pass through.
CHAIN_BEGIN, CHAIN_END = "hetccl_chain_begin", "hetccl_chain_end"
PARTITIONED = "CustomSPMDPartitioning"


def custom_call(
    target: str,
    operands: Sequence[ir.Value],
    result_types: Sequence[ir.Type],
    attributes: Mapping[str, ir.Attribute],
    *,
    side_effect: bool,
    aliases: Mapping[int, int] | None = None,
) -> ir.Operation:
    """A typed-FFI custom call with row-major operands and results."""
    layouts = [list(range(ir.RankedTensorType(v.type).rank))[::-1] for v in operands]
    result_layouts = [list(range(ir.RankedTensorType(t).rank))[::-1] for t in result_types]
    op = mlir.custom_call(
        target,
        result_types=list(result_types),
        operands=list(operands),
        backend_config=dict(attributes),
        has_side_effect=side_effect,
        api_version=4,
        operand_output_aliases=dict(aliases or {}),
        operand_layouts=layouts,
        result_layouts=result_layouts,
    )
    return op.operation


def constant(value: np.ndarray | np.generic) -> ir.Value:
    """An IR constant."""
    return mlir.ir_constant(value)
