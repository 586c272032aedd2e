"""How late the values of a program become ready, from what they depend on.

The measure is the number of heavy operations, one behind the other, that a value waits for. In a backward pass that is the
layer's distance from the loss. It follows from data dependences alone: the order in which a version of JAX writes independent
operations down, and the light ones between them, do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_hetccl._compat import ir
from jax_hetccl.ordering import rewrite


def depths(values: Sequence[ir.Value], block: ir.Block, module: ir.Module) -> list[int]:
    """For each value the length of its longest chain of heavy operations.

    Args:
      values: of the block, or of one around it.
      block: may still grow.
      module: has the functions that are called. What is an argument of the surrounding function, or of a loop's body, is
        ready at once.
    """
    functions = {
        ir.StringAttr(f.operation.attributes["sym_name"]).value: f.operation
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    walk = _Walk(functions)
    known: dict[ir.Value, int] = {}
    for around in reversed(_enclosing(block)):
        walk.through(around, known)
    return [known.get(v, 0) for v in values]


def _enclosing(block: ir.Block) -> list[ir.Block]:
    """The block and those around it in its function, innermost first."""
    found = [block]
    while (owner := found[-1].owner.operation).name != "func.func":
        found.append(owner.block)
    return found


class _Walk:
    def __init__(self, functions: Mapping[str, ir.Operation]):
        self._functions = functions
        self._calls: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def through(self, block: ir.Block, known: dict[ir.Value, int]) -> None:
        """Adds the results of a block's operations."""
        for view in block.operations:
            op = view.operation
            if op.name == "func.call":
                (name,) = rewrite.callees(op)
                found = self._called(name, tuple(known.get(v, 0) for v in op.operands))
            else:
                behind = max((known.get(v, 0) for v in rewrite.used(op)), default=0)
                found = [behind + rewrite.is_heavy(op, self._functions)] * len(op.results)
            known.update(zip(op.results, found, strict=True))

    def _called(self, name: str, arguments: tuple[int, ...]) -> list[int]:
        """The results of a function, given its arguments."""
        if (name, arguments) not in self._calls:
            block = self._functions[name].regions[0].blocks[0]
            known = dict(zip(block.arguments, arguments, strict=True))
            self.through(block, known)
            end = list(block.operations)[-1].operation
            self._calls[name, arguments] = [known.get(v, 0) for v in end.operands]
        return self._calls[name, arguments]
