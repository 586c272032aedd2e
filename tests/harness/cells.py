"""What runs where: the cells of the table (case, mode, spelling) x (layout, transport)."""

from __future__ import annotations

import dataclasses

from harness import platforms
from harness.case import Case, module
from harness.judge import check
from harness.layout import Layout
from harness.pool import Pool, Run

# (layout, transport) -> tags or modules of cases it takes; "!" marks those of which it takes only one check_vma mode of
# each case, the two modes in turn, and every other world the other one. Two clusters over shared memory carry
# every case; the others carry what depends on what they differ in. An axis has one size in a world, so cases whose
# meshes put other axes beside it get a world of their own.
_FIRST = ("2/1", "shm")
WORLDS: dict[tuple[str, str], tuple[str, ...]] = {
    _FIRST: ("!core", "refuse", "!conform", "!turn"),
    ("2/2", "tcp"): ("!conform",),
    ("2/1", "tcp"): ("!wire", "smoke", "!order"),
    ("1/1", "shm"): ("smoke",),
    ("1/1", "tcp"): ("!smoke",),
    ("2/1/2", "tcp"): ("!core", "smoke", "!order"),
    ("2/1/2", "shm"): ("!wire", "smoke"),
    ("1+1/1", "tcp"): ("!autodiff", "!wire", "!order", "smoke"),
    ("1+1/1", "shm"): ("!smoke",),
    ("4/4", "shm"): ("wide", "mesh", "!smoke", "hlo", "conform-mesh", "!turn-mesh"),
    ("4/2", "tcp"): ("mesh", "!smoke", "conform-mesh"),
    # Uneven ones: the main case of every operation.
    ("3/2", "shm"): ("main",),
    ("4/1", "tcp"): ("main",),
    ("2/2/1", "shm"): ("main",),
}
# With HETCCL_TEST_PLATFORMS clusters of one device carry everything, since GPUs are few.
_ON_PLATFORMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("1/1", "shm"): ("core", "refuse", "conform", "!turn"),
    ("1/1", "tcp"): ("!smoke", "!order", "!wire"),
    ("1/2", "shm"): ("!smoke", "!wire"),
}
_NEEDS_EVEN_PAIRS = {"pp"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One test: a run in a world."""

    layout: str
    transport: str
    run: Run

    def __str__(self) -> str:
        vma = "vma" if self.run.vma else "novma"
        return f"{self.layout}-{self.transport}-{self.run.case.name}-{vma}-{self.run.api}"

    def check(self, pool: Pool) -> None:
        world = pool.world(Layout.parse(self.layout), self.transport, self.run.spec)
        check(pool, world, self.run, compiler_differs=platforms.differ())


def worlds() -> dict[tuple[str, str], tuple[str, ...]]:
    """The worlds of this run, in order, with what each takes."""
    if not platforms.chosen():
        return WORLDS
    # What a program's text is on a CPU says nothing about a GPU.
    others = {k: tuple(t for t in v if t != "hlo") for k, v in WORLDS.items() if k not in _ON_PLATFORMS}
    return {**_ON_PLATFORMS, **others}


def _takes(tags: tuple[str, ...], case: Case, soak: bool) -> tuple[bool, bool]:
    """(runs at all, in both modes)."""
    if "soak" in case.tags:
        return soak and "smoke" in tags, True
    names = case.tags | {case.name.split(".")[0]}
    whole = bool(names & set(tags))
    half = bool(names & {t[1:] for t in tags if t.startswith("!")})
    return whole or half or (soak and "core" in case.tags), whole or soak


def cells(modules: tuple[str, ...], soak: bool, one_mode: bool = False) -> list[Cell]:
    """The cells of these modules of cases. `one_mode`: no case in both check_vma modes, and the other
    one where a world takes only one anyway."""
    found = []
    for place, ((layout, transport), tags) in enumerate(worlds().items()):
        for number, case in enumerate(module(*modules)):
            runs, both = _takes(tags, case, soak)
            if (
                not runs
                or Layout.parse(layout).total < case.ranks
                or (_NEEDS_EVEN_PAIRS & set(case.mesh.axes) and layout != "4/4")
            ):
                continue
            turn = (number + place + one_mode) % len(case.vma)
            modes = case.vma if both and not one_mode else case.vma[turn : turn + 1]
            apis = case.api if soak or (layout, transport) == _FIRST or "mesh" in case.tags else case.api[:1]
            found += [Cell(layout, transport, Run(case, vma, api)) for vma in modes for api in apis]
    return found


def world_order(cell: Cell) -> tuple[int, int, int]:
    """Position of the cell's world: tests of one world run together."""
    per_rank, order = cell.run.spec.group
    return list(worlds()).index((cell.layout, cell.transport)), per_rank, int(order != "given")
