"""How the clusters learn each other's layouts, and the engine the plans.

A program holds only what follows from the own cluster's layout (buffer sizes and plan ids), so nothing waits while
JAX traces and XLA partitions: each process publishes its cluster's layout from there, and waits for the others' when
its program is compiled (:meth:`Syncs.finish`). Published first and waited for later, the order in which a partitioner
visits a program's syncs cannot block anyone.

The first layout of a sync stays: when only one cluster compiles again, with its arrays sharded differently, the others
do not learn of it. Its partitioner then brings the arrays into the first layout.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_hetccl._errors import AgreementError, HetcclError
from jax_hetccl._world import World
from jax_hetccl.exchange import fingerprint
from jax_hetccl.ordering.module import teach
from jax_hetccl.plan import Plan
from jax_hetccl.syncing import shares
from jax_hetccl.syncing.spec import Spec

# The name of a sync's function in lowered programs.
OPERATION = "hetccl_sync"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one cluster holds the arrays of a sync.

    Attributes:
      ranks: of the program's devices, in the program's order.
      boxes: for each array, the box of each of these ranks.
    """

    ranks: tuple[int, ...]
    boxes: tuple[tuple[shares.Box, ...], ...]

    def packed(self) -> dict[str, Any]:
        """For the control plane: equal boxes once."""
        arrays = []
        for boxes in self.boxes:
            distinct = list(dict.fromkeys(boxes))
            at = {box: i for i, box in enumerate(distinct)}
            arrays.append([distinct, [at[box] for box in boxes]])
        return {"ranks": self.ranks, "arrays": arrays}

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Layout:
        boxes = []
        for distinct, which in packed["arrays"]:
            made = [tuple((int(a), int(b)) for a, b in box) for box in distinct]
            boxes.append(tuple(made[i] for i in which))
        return cls(tuple(packed["ranks"]), tuple(boxes))


@dataclasses.dataclass(frozen=True)
class Lesson:
    """An exchange as the engine learns it; see ``exchange.Exchange``."""

    id: int
    wire_id: int
    text: str
    plan: Plan


class _Entry:
    def __init__(self, number: int, spec: Spec):
        self.number, self.spec = number, spec
        self.layout: Layout | None = None
        self.token: Any = None
        self.taught = False
        self.warned = False


class Syncs:
    """The syncs of a world. Thread-safe."""

    def __init__(self, world: World):
        self._world = world
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._error: HetcclError | None = None
        self.operations: dict[int, Any] = {}  # the functions of the syncs, by key: traced once

    def register(self, spec: Spec) -> None:
        """Numbers a sync when it is traced first. Programs are traced in the same order in all clusters."""
        with self._lock:
            if spec.key not in self._entries:
                self._entries[spec.key] = _Entry(len(self._entries), spec)

    def settle(self, spec: Spec, layout: Layout, token: Any = None) -> tuple[Layout, Any]:
        """The layout in which the own cluster takes part in a sync: this one, if it is the first.

        Args:
          spec: the sync, registered before.
          layout: how the program being compiled would hold the arrays.
          token: what belongs to that layout; kept.

        Returns:
          The layout that counts and its token.

        Raises:
          AgreementError: the layout that counts is one of other devices.
        """
        with self._lock:
            entry = self._entries[spec.key]
            if entry.layout is None:
                entry.layout, entry.token = layout, token
                described = {
                    "op": spec.op,
                    "name": spec.name,
                    "weighted": spec.weighted,
                    "items": [str(i) for i in spec.items],
                    "key": spec.key,
                    **layout.packed(),
                }
                self._world.control.publish(f"sync/{entry.number}", described)
            elif entry.layout.ranks != layout.ranks:
                raise AgreementError(
                    f"{spec.text}: the clusters agreed that these arrays are on the ranks {list(entry.layout.ranks)} in "
                    f"this order, but in the program being compiled they are on {list(layout.ranks)}; the other "
                    "clusters cannot see the change. Give the two syncs different names: hetccl.sync(..., name=...)."
                )
            elif entry.layout != layout and not entry.warned:
                entry.warned = True
                _log.warning(
                    "%s: sharded differently than in the first program that synced these arrays; they are brought into "
                    "the first layout, on which the clusters agreed. If all clusters changed, give the syncs different "
                    "names: hetccl.sync(..., name=...).",
                    spec.text,
                )
            return entry.layout, entry.token

    def keep_error(self, error: HetcclError) -> None:
        """Keeps an error that is about to be raised through a compiler, which reports its text only."""
        with self._lock:
            self._error = error

    def take_error(self) -> HetcclError | None:
        """The error kept last, once."""
        with self._lock:
            error, self._error = self._error, None
            return error

    def finish(self, text: Callable[[], str]) -> None:
        """Waits for the other clusters' layouts of the syncs of a program, and tells the engine the plans.

        Args:
          text: the program that has been compiled. Programs of one device settle their syncs when they are lowered, which
            may be long before; only those in the text are waited for.

        Raises:
          AgreementError: another cluster syncs something else; names both and the first array that differs.
          RendezvousError: another cluster did not compile it within the arrival timeout.
        """
        with self._lock:
            waiting = [e for e in self._entries.values() if e.layout is not None and not e.taught]
        if any(e.token is None for e in waiting):
            program = text()
            waiting = [e for e in waiting if e.token is not None or f"program = {signed(e.spec.key)} :" in program]
        for entry in sorted(waiting, key=lambda e: e.number):
            layouts = self._collect(entry)
            self._world.engine.set_program(entry.spec.key, entry.spec.text)
            for lesson in lessons(entry.spec, layouts, self._world.cluster, self._world.local_ranks):
                teach(self._world, lesson)
            entry.taught = True

    def _collect(self, entry: _Entry) -> list[Layout]:
        world = self._world
        members = world.control.members
        first = {m.cluster: m.index for m in reversed(members)}  # each cluster's first process
        siblings = [m.index for m in members if m.cluster == world.cluster]
        wanted = [*(i for c, i in first.items() if c != world.cluster), *siblings]
        answers = world.control.collect(f"sync/{entry.number}", wanted, world.config.arrival_timeout)
        layouts = []
        mine = answers[world.control.me]
        for other in siblings:
            if Layout.unpacked(answers[other]) != Layout.unpacked(mine):
                raise AgreementError(
                    f"{entry.spec.text}: the processes {members[world.control.me].name} and {members[other].name} of one "
                    "cluster run it on different devices or with different shardings; all processes of a cluster must "
                    "run one program over arrays on all of its devices."
                )
        for info in world.clusters:
            if info.index == world.cluster:
                layouts.append(Layout.unpacked(mine))
                continue
            theirs = answers[first[info.index]]
            if theirs["key"] != entry.spec.key:
                here = world.clusters[world.cluster].name
                raise AgreementError(_difference(entry.spec, theirs, here, info.name))
            layouts.append(Layout.unpacked(theirs))
        return layouts


def signed(number: int) -> int:
    """An unsigned 64-bit number's bit pattern as a signed one, as attributes hold it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _difference(spec: Spec, theirs: Mapping[str, Any], here: str, there: str) -> str:
    """What two clusters' syncs of the same number differ in."""
    ours = [str(i) for i in spec.items]
    found = next((p for p in zip(ours, theirs["items"], strict=False) if p[0] != p[1]), None)
    if found is not None:
        what = f"{found[0]} in {here!r}, {found[1]} in {there!r}"
    elif len(ours) != len(theirs["items"]):
        what = f"{len(ours)} arrays in {here!r}, {len(theirs['items'])} in {there!r}"
    else:
        what = f"op, name, weighted = {spec.op!r}, {spec.name!r}, {spec.weighted} in {here!r}, "
        what += f"{theirs['op']!r}, {theirs['name']!r}, {theirs['weighted']} in {there!r}"
    return (
        f"sync: clusters {here!r} and {there!r} sync different things: {what}. Every cluster must trace the same syncs "
        "of trees with the same paths, global shapes and dtypes in the same order."
    )


def ids(spec: Spec, layout: Layout, step: int) -> tuple[int, int]:
    """The plan id and the program id of a sync's exchange number ``step`` (phases of one bucket count on)."""
    return fingerprint((spec.key, layout.ranks, layout.boxes, step)), spec.key


def lessons(spec: Spec, layouts: Sequence[Layout], me: int, local: Sequence[int]) -> list[Lesson]:
    """The plans of a sync's exchanges, of this process's ranks."""
    leaves = []
    for i, item in enumerate(spec.arrays):
        held = tuple(shares.shares(layout.ranks, layout.boxes[i]) for layout in layouts)
        cut = shares.cells(item.shape, spec.clusters) if spec.owned else shares.one_cell(item.shape)
        leaves.append((held, cut, i))
    ranks = [r for r in layouts[me].ranks if r in set(local)]
    agreed = fingerprint([(layout.ranks, layout.boxes) for layout in layouts])
    result: list[Lesson] = []
    for bucket in spec.buckets:
        out = [shares.Leaf(h, cut, spec.wire(i).itemsize, spec.whole(i)) for h, cut, i in (leaves[i] for i in bucket)]
        if not spec.owned:
            plans = [shares.all_to_all(out, me, ranks)]
        else:
            back = [
                shares.Leaf(leaves[i][0], leaves[i][1], spec.result_wire(i).itemsize)
                for i in bucket
                if i < len(spec.items)
            ]
            plans = [shares.to_owners(out, me, ranks), shares.from_owners(back, me, ranks)]
        for plan in plans:
            number, _ = ids(spec, layouts[me], len(result))
            wire = fingerprint((spec.key, agreed, len(result)))
            result.append(Lesson(number, wire, f"{spec.text} #{len(result)}", plan))
    return result
