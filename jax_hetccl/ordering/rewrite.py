"""Small readings and rewrites of StableHLO that the ordering pass is made of."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_hetccl import _compat, exchange
from jax_hetccl._compat import hlo, ir, sdy

_CONFIG = "mhlo.backend_config"
_FRONTEND, _SYNCS = "mhlo.frontend_attributes", "hetccl_syncs"


def target(op: ir.Operation) -> str:
    """The target of a custom call, "" for any other operation."""
    return ir.StringAttr(op.attributes["call_target_name"]).value if op.name == "stablehlo.custom_call" else ""


def plan_id(op: ir.Operation) -> int:
    """The exchange that a marker, start or done stands for."""
    return exchange.u64(ir.DictAttr(op.attributes[_CONFIG])["plan"])


def add_attributes(op: ir.Operation, **more: ir.Attribute) -> None:
    """Adds attributes to a typed custom call."""
    old = ir.DictAttr(op.attributes[_CONFIG])
    op.attributes[_CONFIG] = ir.DictAttr.get({**{a.name: a.attr for a in old}, **more})


def note_syncs(module: ir.Module, keys: Iterable[int]) -> None:
    """Writes down in a program which syncs it has: they are compared and taught when it has been compiled, and programs
    that differ in nothing else are different ones for a cache."""
    attributes = module.operation.attributes
    old = ir.DictAttr(attributes[_FRONTEND]) if _FRONTEND in attributes else ()
    text = ir.StringAttr.get(",".join(f"{key:016x}" for key in dict.fromkeys(keys)))
    attributes[_FRONTEND] = ir.DictAttr.get({**{a.name: a.attr for a in old}, _SYNCS: text})


def syncs(module: ir.Module) -> list[int]:
    """The syncs of a finished program, in order."""
    attributes = module.operation.attributes
    if _FRONTEND not in attributes or _SYNCS not in (noted := ir.DictAttr(attributes[_FRONTEND])):
        return []
    return [int(key, 16) for key in ir.StringAttr(noted[_SYNCS]).value.split(",")]


def callees(op: ir.Operation) -> list[str]:
    """The functions that an operation calls."""
    names = [n for n in ("callee", "decomposition") if n in op.attributes]
    return [ir.FlatSymbolRefAttr(op.attributes[n]).value for n in names]


def inner(op: ir.Operation) -> Iterator[ir.Operation]:
    """The operations directly inside an operation's regions."""
    for region in op.regions:
        for block in region.blocks:
            for o in block.operations:
                yield o.operation


def used(op: ir.Operation) -> Iterator[ir.Value]:
    """Every value an operation reads, also those its regions take from outside."""
    yield from op.operands
    for o in inner(op):
        yield from used(o)


def texts(op: ir.Operation, registry: exchange.Registry) -> Iterator[str]:
    """What the exchanges inside an operation are."""
    for o in inner(op):
        if target(o) == exchange.MARKER:
            yield registry[plan_id(o)].text
        yield from texts(o, registry)


def segments(
    ops: Sequence[ir.Operation], has_exchange: Callable[[ir.Operation], bool]
) -> list[list[tuple[ir.Operation, bool]]]:
    """Splits a block at the region markers that enclose an exchange; the markers themselves are left out.

    In the other clusters the enclosed operations stand in a region of their own, which exchanges do not cross.

    Returns:
      The segments' operations, each with whether a decomposition emitted it.
    """
    cuts: set[int] = set()
    begins: list[int] = []
    for i, op in enumerate(ops):
        if target(op) == _compat.REGION_BEGIN:
            begins.append(i)
        elif target(op) == _compat.REGION_END:
            begin = begins.pop()
            if any(has_exchange(o) for o in ops[begin + 1 : i]):
                cuts.update((begin, i))
    result: list[list[tuple[ir.Operation, bool]]] = [[]]
    emitted = False
    for i, op in enumerate(ops):
        if target(op) in (_compat.LOWERED_BEGIN, _compat.LOWERED_END):
            emitted = target(op) == _compat.LOWERED_BEGIN
        elif i in cuts:
            result.append([])
        elif target(op) not in _compat.MARKERS:
            result[-1].append((op, emitted))
    return [s for s in result if s]


def rebuilt(
    op: ir.Operation,
    operands: Sequence[ir.Value],
    *,
    attributes: Mapping[str, ir.Attribute] | None = None,
) -> ir.Operation:
    """Replaces an operation by one with other operands and a chain as an additional last result; its regions move."""
    old = {name: op.attributes[name] for name in (a if isinstance(a, str) else a.name for a in op.attributes)}
    new = ir.Operation.create(
        op.name,
        results=[*(r.type for r in op.results), exchange.chain_type()],
        operands=list(operands),
        attributes={**old, **(attributes or {})},
        regions=len(op.regions),
        ip=ir.InsertionPoint(op),
        loc=op.location,
    )
    for old_region, new_region in zip(op.regions, new.regions, strict=True):
        for block in list(old_region.blocks):
            block.append_to(new_region)
    for old_result, new_result in zip(op.results, new.results, strict=False):
        old_result.replace_all_uses_with(new_result)
    op.erase()
    return new


def extend_end(block: ir.Block, value: ir.Value) -> None:
    """Adds a value to what a block returns."""
    end = list(block.operations)[-1].operation
    ir.Operation.create(
        end.name, results=[], operands=[*end.operands, value], ip=ir.InsertionPoint(end), loc=end.location
    )
    end.erase()


def extend_signature(function: ir.Operation) -> None:
    """Adds a chain to a function's arguments and results."""
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    chain = exchange.chain_type()
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([*type_.inputs, chain], [*type_.results, chain])
    )
    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            function.attributes[name] = ir.ArrayAttr.get(
                [*ir.ArrayAttr(function.attributes[name]), ir.DictAttr.get({})]
            )


def replicated_too(shardings: ir.Attribute) -> ir.Attribute:
    """Shardings of a manual computation's values with a replicated vector, the chain, added."""
    old = list(sdy.TensorShardingPerValueAttr(shardings).shardings)
    like = sdy.TensorShardingAttr(old[0]) if old else None
    mesh = like.mesh_or_ref if like is not None else ir.FlatSymbolRefAttr.get("mesh")
    replicated = sdy.TensorShardingAttr.get(mesh, [sdy.DimensionShardingAttr.get([], is_closed=True)])
    return sdy.TensorShardingPerValueAttr.get([*old, replicated])


def mesh_axes(op: ir.Operation, module: ir.Module) -> dict[str, int]:
    """The axes and sizes of the mesh that a manual computation runs on."""
    values = [*sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings]
    values += sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings
    reference = sdy.TensorShardingAttr(values[0]).mesh_or_ref
    if isinstance(reference, ir.FlatSymbolRefAttr) or str(reference).startswith("@"):
        name = ir.FlatSymbolRefAttr(reference).value
        (mesh,) = (
            o.operation.attributes["mesh"]
            for o in module.body.operations
            if o.operation.name == "sdy.mesh" and ir.StringAttr(o.operation.attributes["sym_name"]).value == name
        )
    else:
        mesh = reference
    return {axis.name: axis.size for axis in (sdy.MeshAxisAttr(a) for a in sdy.MeshAttr(mesh).axes)}


def is_full(op: ir.Operation, module: ir.Module) -> bool:
    """Whether a manual computation leaves nothing to the partitioner."""
    axes: Any = sdy.ManualAxesAttr(op.attributes["manual_axes"])
    manual = set(axes)
    return math.prod(size for axis, size in mesh_axes(op, module).items() if axis not in manual) == 1


_MOVES = {f"stablehlo.{n}" for n in ("reshape", "transpose", "slice", "pad", "concatenate", "broadcast_in_dim")}
_OPAQUE = {f"stablehlo.{n}" for n in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute")}
_OPAQUE |= {"stablehlo.custom_call", "stablehlo.constant"}


def is_settled(value: ir.Value) -> bool:
    """Whether a value's bits cannot depend on what a compiler fuses: a program's argument, the result of a collective
    or a custom call, or such a value moved around."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        op = owner.owner.operation
        if op.name == "sdy.manual_computation":
            return is_settled(op.operands[ir.BlockArgument(value).arg_number])
        return op.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    op = owner.operation
    return op.name in _OPAQUE or (op.name in _MOVES and all(is_settled(v) for v in op.operands))


_HEAVY = {
    f"stablehlo.{n}"
    for n in ("dot_general", "dot", "convolution", "while", "fft", "cholesky", "triangular_solve", "sort")
}


def is_heavy(op: ir.Operation, functions: Mapping[str, ir.Operation]) -> bool:
    """Whether an operation computes for long enough to be worth overlapping with a transfer."""
    if op.name in _HEAVY:
        return True
    bodies = [op, *(functions[n] for n in callees(op) if n in functions)]
    return any(is_heavy(o, functions) for body in bodies for o in inner(body))


def tied_behind(op: ir.Operation, chain: ir.Value, end: ir.Operation) -> ir.Value:
    """Makes an operation wait for the chain; returns the chain behind that.

    The chain and one operand pass a barrier together, in front of ``end``. An operand that nothing is fused into is
    taken if there is one.
    """
    operands = list(op.operands)
    if not operands:
        return chain
    at = next((i for i, v in enumerate(operands) if is_settled(v)), 0)
    with ir.InsertionPoint(end):
        value, chain = _barrier(operands[at], chain)
    op.operands[at] = value
    return chain


def tied_before(op: ir.Operation, chain: ir.Value, end: ir.Operation, ran: Sequence[ir.Operation]) -> ir.Value:
    """Makes the chain wait for an operation that has run; returns the chain behind it.

    Compilers drop what nobody reads from a barrier, so a value passes it that is used further on: a result of the
    operation, or of one of those in ``ran`` that depend on it.
    """
    reached = {v for v in op.results}
    for candidate in ran:
        if candidate != op:
            if not any(v in reached for v in used(candidate)):
                continue
            reached.update(candidate.results)
        for value in candidate.results:
            later = [use for use in value.uses if _in_block(use.owner, op) not in ran]
            if later:
                with ir.InsertionPoint(end):
                    through, chain = _barrier(value, chain)
                for use in later:
                    use.owner.operands[use.operand_number] = through
                return chain
    return chain


def apart(value: ir.Value) -> ir.Value:
    """The value behind a barrier of its own, so that nothing is fused with the custom call that it comes from or goes to.

    XLA's GPU compiler lets a custom call read from a slice, or write into the place of a dynamic_update_slice (the
    stacked results of a scan), and the aliases that start and done rely on are lost. What moves no data needs none.
    """
    return value if isinstance(value.owner, ir.Block) else _barrier(value)[0]


def _barrier(*values: ir.Value) -> list[ir.Value]:
    """The values as they are once all of them exist."""
    return list(hlo.OptimizationBarrierOp(values).results)


def _in_block(inner_op: Any, op: ir.Operation) -> ir.Operation:
    """The operation of ``op``'s block that an operation is, or stands in."""
    found = inner_op.operation
    while found.block != op.block:
        found = found.parent.operation
    return found


@contextlib.contextmanager
def behind(op: ir.Operation) -> Iterator[None]:
    """Emits right behind an operation."""
    operations = list(op.block.operations)
    at = next(i for i, o in enumerate(operations) if o.operation == op)
    with ir.InsertionPoint(operations[at + 1]):
        yield
