"""Spanning axes: mesh axes whose ranks continue in the other clusters.

``lax`` keeps its meaning: while a shard_map is traced or lowered, a spanning axis has its *global* size (the sum over
the clusters), so shapes, divisions and gradients come out as on one large mesh. Where a collective over it is lowered,
:mod:`jax_hetccl.decompose` replaces it by local collectives and exchanges, and :mod:`jax_hetccl.ordering` gives the
exchanges of the whole program one order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl import _compat, loading
from jax_hetccl._compat import AnyMesh, Lowering, ir
from jax_hetccl._errors import AgreementError, RendezvousError, UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.agreement import Agreement
from jax_hetccl.decompose import RULES
from jax_hetccl.decompose.common import Site
from jax_hetccl.exchange import START, Registry
from jax_hetccl.ordering import module as ordering
from jax_hetccl.ordering import rewrite
from jax_hetccl.syncing.agree import Syncs
from jax_hetccl.syncing.combine import Combiner
from jax_hetccl.unready import Unready, Wait


class SpanningHooks:
    """What JAX asks about spanning axes while it traces and lowers (see ``_compat.Hooks``)."""

    def __init__(self, world: World):
        self.world = world
        self.agreement = Agreement(world)
        self.registry = Registry()
        self.syncs = Syncs(world)
        self.combiner = Combiner(world, self.syncs)
        self.unready = Unready(world.control, self._waits, world.fail)
        world.watch(self.unready.look)
        self._lowering = _Lowering()

    def _waits(self) -> list[Wait]:
        waits = self.world.engine.waits() if self.world.engine else ()
        return [Wait(self.world.member_of_rank(rank), program, text) for rank, program, text in waits]

    def spans(self, axis: object) -> bool:
        spans = self.agreement.spans(axis) and not _compat.in_local()
        self._lowering.spanning |= spans
        return spans

    def could_span(self, axis: object) -> bool:
        return self.agreement.spans(axis)

    def global_sizes(self, mesh: AnyMesh) -> Mapping[str, int]:
        axis = self.agreement.spanning_axis(mesh.axis_names)
        return {axis: self.agreement.view(mesh).size} if axis is not None and self.spans(axis) else {}

    def local_offset(self, mesh: AnyMesh, axis: str) -> int:
        return self.agreement.view(mesh).offset if self.spans(axis) else 0

    def lower(
        self, op: str, lowering: Lowering, x: ir.Value, axes: tuple[str, ...], params: dict[str, Any]
    ) -> ir.Value:
        self.unready.goes_on()
        view = self.agreement.view(lowering.mesh)
        platforms = tuple(c.platform for c in self.world.clusters)
        return RULES[op](Site(self.registry, view, op, lowering, axes, platforms), x, params)

    def refuse(self, op: str, axes: Sequence[object]) -> None:
        names = ", ".join(str(a) for a in axes)
        spanning = ", ".join(repr(a) for a in axes if self.spans(a))
        known = ", ".join(sorted(RULES))
        raise UnsupportedError(
            f"lax.{op} over ({names}): the axis {spanning} spans clusters, and this version supports {known}, pmean, "
            "axis_index and axis_size there. Use one of these, or a mesh axis that "
            "stays inside the cluster."
        )

    def cotangent(self, mesh: AnyMesh, axes: frozenset[str], mentioned: frozenset[str], check_vma: bool) -> float:
        """The factor of a cotangent that enters a shard_map's output from outside.

        JAX divides the cotangent of an output that does not vary over a manual axis by that axis' *local* size (with
        ``check_vma=False``); the division must be by the global one. An output that is sharded over the spanning axis
        is only this cluster's part, and what was computed from it outside is this cluster's alone.
        """
        axis = self.agreement.spanning_axis(mesh.axis_names)
        if axis is None or axis not in axes or not self.spans(axis):
            return 1.0
        if axis in mentioned:
            if not sharded_cotangents.enabled:
                raise UnsupportedError(
                    f"differentiating across a shard_map output that is sharded over the spanning axis {axis!r}: outside "
                    "of the shard_map it is this cluster's part only, so a loss computed from it would be this cluster's "
                    f"loss and not the global one. Reduce inside, e.g. lax.pmean(loss, {axis!r}) with out_specs=P(), or "
                    "wrap the differentiation in `with hetccl.sharded_cotangents():` if each cluster passes its own part "
                    "of a global cotangent."
                )
            return 1.0
        view = self.agreement.view(mesh)
        return 1.0 if check_vma else view.sizes[view.cluster] / view.size

    def lowering_begins(self) -> None:
        self._lowering.spanning = False

    def loading(self, devices: Iterable[Any]) -> contextlib.AbstractContextManager[None] | None:
        return loading.section(self.world, devices)

    def finish_module(self, module: ir.Module) -> None:
        if program := ordering.finish(self.world, self.registry, module):
            self.unready.lowered(program.id, *program.streams)

    def compiled(self, module: ir.Module) -> bool:
        syncs = rewrite.syncs(module)
        if known := self.syncs.finish(syncs):
            self.unready.lowered(*syncs)
        return known

    def lowering_failed(self, error: Exception) -> None:
        """Tells the others of an error that only this cluster has; one that lies in the program they have too."""
        if self._lowering.spanning:
            self.unready.failed(error)
        if isinstance(error, (AgreementError, RendezvousError)):
            self.world.fail("agreement", f"cluster {self.world.clusters[self.world.cluster].name!r}: {error}")

    def compile_failed(self, module: ir.Module, error: Exception) -> None:
        """The other clusters may be waiting in this program already: they all get this cluster's error."""
        if rewrite.syncs(module) or START in str(module):
            world = self.world
            self.world.fail(
                "agreement",
                f"cluster {world.clusters[world.cluster].name!r} could not compile a program with collectives over a "
                f"spanning axis, which the other clusters may be running: {type(error).__name__}: {error}",
            )
        if cause := self.syncs.take_error():
            raise cause from error


class _Lowering(threading.local):
    """The program that this thread lowers: whether it has been seen to use a spanning axis."""

    spanning = False


class _ShardedCotangents(threading.local):
    """Context manager: cotangents of outputs sharded over a spanning axis are this cluster's part of a global one.

    Example:
      >>> with hetccl.sharded_cotangents():
      ...     y, vjp = jax.vjp(f, w, x)      # y is sharded over "data"
      ...     dw, dx = vjp(my_part_of_dy)
    """

    enabled = False

    def __call__(self) -> _ShardedCotangents:
        return self

    def __enter__(self) -> _ShardedCotangents:
        self._before, self.enabled = self.enabled, True
        return self

    def __exit__(self, *_: object) -> None:
        self.enabled = self._before


sharded_cotangents = _ShardedCotangents()
