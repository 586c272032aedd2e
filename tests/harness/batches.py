"""Runs many cases as one program, because compiling each alone takes most of the time.

Every case stays a test of its own, judged alone. When a batch fails as a whole, its cases run one by one, so that the
report names the one at fault; if each passes alone, the batch's failure is everybody's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness import platforms
from harness.case import CASES, Case
from harness.cells import Cell, cells
from harness.judge import check, differences
from harness.layout import Layout
from harness.pool import Pool, Reply, WorkerGoneError, World

# A batch compiles in some seconds and, if it fails, is repeated one by one in as many more.
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Batched(Cell):
    """One case of a batch, and the names of all."""

    names: tuple[str, ...]


def batched_cells(modules: tuple[str, ...], soak: bool, one_mode: bool = False) -> list[Cell]:
    """The cells of these modules in batches; what is rejected or refused stays alone."""
    found: list[Cell] = []
    groups: dict[Any, list[Cell]] = {}
    for cell in cells(modules, soak, one_mode):
        if cell.run.vma in cell.run.case.rejects or cell.run.case.refused:
            found.append(cell)
        else:
            key = cell.layout, cell.transport, cell.run.spec, cell.run.vma, cell.run.api
            groups.setdefault(key, []).append(cell)
    for group in groups.values():
        for first in range(0, len(group), SIZE):
            batch = group[first : first + SIZE]
            names = tuple(cell.run.case.name for cell in batch)
            found += [Batched(cell.layout, cell.transport, cell.run, names) for cell in batch]
    return found


class Batches:
    """What became of every batch that ran.

    Args:
        pool: gives the worlds and the oracle.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[Any, dict[str, list[str]]] = {}

    def check(self, cell: Cell) -> None:
        """Fails with every difference found; the first cell of a batch runs it."""
        if not isinstance(cell, Batched):
            cell.check(self._pool)
            return
        key = cell.layout, cell.transport, cell.run.spec, cell.run.vma, cell.run.api, cell.names
        if key not in self._known:
            self._known[key] = self._run(cell)
        problems = self._known[key][cell.run.case.name]
        if problems:
            raise AssertionError("\n".join([str(cell), *problems]))

    def _world(self, cell: Cell) -> World:
        return self._pool.world(Layout.parse(cell.layout), cell.transport, cell.run.spec)

    def _run(self, cell: Batched) -> dict[str, list[str]]:
        """Problems of every case of the cell's batch."""
        run = dataclasses.replace(
            cell.run, case=CASES["batch.together"], mesh=cell.run.spec, params={"cases": list(cell.names)}
        )
        world = self._world(cell)
        self._pool.oracle.begin(run, world.layout.devices)
        try:
            replies = world.run(run)
        except WorkerGoneError as gone:
            self._pool.discard()
            return self._one_by_one(cell, str(gone))
        oracle = self._pool.oracle.run(run, world.layout.devices)
        wrong = [f"{r.label}: {r.error['trace']}" for r in (oracle, *replies) if r.error]
        wrong += [f"{r.label}: the world failed: {r.health['message']}" for r in replies if r.health]
        if wrong:
            self._pool.discard()
            return self._one_by_one(cell, "\n".join(wrong))
        return {
            name: differences(CASES[name], _part(oracle, name), [_part(r, name) for r in replies], platforms.differ())
            for name in cell.names
        }

    def _one_by_one(self, cell: Batched, why: str) -> dict[str, list[str]]:
        alone = {name: self._alone(cell, CASES[name]) for name in cell.names}
        if not any(alone.values()):
            return {name: [f"passes alone, but the batch {cell.names} failed:", why] for name in cell.names}
        return alone

    def _alone(self, cell: Batched, case: Case) -> list[str]:
        try:
            run = dataclasses.replace(cell.run, case=case)
            check(self._pool, self._world(cell), run, compiler_differs=platforms.differ())
        except (AssertionError, WorkerGoneError) as error:
            return [str(error)]
        return []


def _part(reply: Reply, name: str) -> Reply:
    """What a reply to a batch says of one case."""
    head = f"[{name!r}]"
    leaves = {k.removeprefix(head): v for k, v in (reply.leaves or {}).items() if k.startswith(head)}
    return Reply(reply.label, reply.cluster, reply.raw, leaves)
