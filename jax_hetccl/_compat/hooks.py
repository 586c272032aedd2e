"""What a spanning axis changes in JAX: the interface that its implementation fills in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jax._src.lib.mlir import ir

from jax_hetccl._compat.base import AnyMesh
from jax_hetccl._compat.lowering import Lowering


class Hooks(Protocol):
    """What a spanning axis changes in JAX; implemented by :mod:`jax_hetccl.spanning`."""

    def global_sizes(self, mesh: AnyMesh) -> Mapping[str, int]:
        """The sizes, over all clusters, of the axes of ``mesh`` that span."""
        ...

    def local_offset(self, mesh: AnyMesh, axis: str) -> int:
        """The global index of the own cluster's first rank along ``axis``; 0 if it does not span."""
        ...

    def spans(self, axis: object) -> bool:
        """Whether a collective over an axis of that name spans clusters here: not inside ``local()``."""
        ...

    def could_span(self, axis: object) -> bool:
        """Whether an axis of that name spans clusters outside of ``local()``."""
        ...

    def lower(
        self, op: str, lowering: Lowering, x: ir.Value, axes: tuple[str, ...], params: dict[str, Any]
    ) -> ir.Value:
        """Lowers a collective over ``axes``, one of which spans, in a fully manual region."""
        ...

    def refuse(self, op: str, axes: Sequence[object]) -> None:
        """Raises the error for a collective that cannot span yet."""
        ...

    def cotangent(self, mesh: AnyMesh, axes: frozenset[str], mentioned: frozenset[str], check_vma: bool) -> float:
        """The factor for a cotangent that enters a shard_map from outside, or an error if it has no meaning."""
        ...

    def lowering_begins(self) -> None:
        """Is told that a whole program is going to be lowered."""
        ...

    def finish_module(self, module: ir.Module) -> None:
        """Orders the exchanges of a whole lowered program, in place."""
        ...

    def loading(self, devices: Iterable[Any]) -> contextlib.AbstractContextManager[Any] | None:
        """What surrounds a load of a program onto these devices; None where that needs nothing."""
        ...

    def compiled(self, module: ir.Module) -> bool:
        """Is told when XLA has compiled a program; says whether it can be run. If not, it must be compiled here, and not
        be taken from a cache."""
        ...

    def lowering_failed(self, error: Exception) -> None:
        """Is told of a program that was not lowered here."""
        ...

    def compile_failed(self, module: ir.Module, error: Exception) -> None:
        """Is told of a program that XLA did not compile here; may raise a better error."""
        ...
