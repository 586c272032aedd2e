"""How the clusters learn each other's layouts, and the engine the plans.

A program holds only what follows from the own cluster's layout (buffer sizes and plan ids), so nothing waits while
JAX traces and XLA partitions: layouts are noted then, and when the program has been compiled they are all published
first and the others' waited for afterwards (:meth:`Syncs.finish`). So the order in which a partitioner visits a
program's syncs cannot block anyone, and a program that one cluster only looks at concerns nobody.

A sync is known by its content (operation, paths, shapes, dtypes, name), not by a count: JAX versions trace in
different orders. A cluster that publishes syncs which this one does not have, and not those it has, runs another program.

The first layout of a sync stays: when only one cluster compiles again, with its arrays sharded differently, the others
do not learn of it. Its partitioner then brings the arrays into the first layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl._errors import AgreementError, HetcclError, PeerLostError, RendezvousError
from jax_hetccl._world import World
from jax_hetccl.exchange import fingerprint
from jax_hetccl.ordering.module import teach
from jax_hetccl.plan import Plan
from jax_hetccl.syncing import shares
from jax_hetccl.syncing.spec import Spec

# How long another cluster may have published other syncs, and not the ones waited for, before that is a difference.
_GRACE_S = 2.0

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
    def __init__(self, spec: Spec, layout: Layout, token: Any):
        self.spec, self.layout, self.token = spec, layout, token
        self.published = False
        self.taught = False
        self.warned = False


class Syncs:
    """The syncs of a world. Thread-safe."""

    def __init__(self, world: World):
        self._world = world
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._reported: set[tuple[int, str]] = set()  # differences that were an error once: (member, key)
        self._error: HetcclError | None = None
        self.operations: dict[int, Any] = {}  # the functions of the syncs, by key: traced once

    def settle(self, spec: Spec, layout: Layout, token: Any = None) -> tuple[Layout, Any]:
        """The layout in which the own cluster takes part in a sync: this one, if it is the first.

        Args:
          spec: the sync.
          layout: how the program being compiled would hold the arrays.
          token: what belongs to that layout; kept.

        Returns:
          The layout that counts and its token.

        Raises:
          AgreementError: the layout that counts is one of other devices.
        """
        with self._lock:
            entry = self._entries.setdefault(spec.key, _Entry(spec, layout, token))
            if entry.layout.ranks != layout.ranks:
                raise AgreementError(
                    f"{spec.text}: the clusters agreed that these arrays are on the ranks {list(entry.layout.ranks)} in "
                    f"this order, but in the program being compiled they are on {list(layout.ranks)}; the other "
                    "clusters cannot see the change. Give the two syncs different names: hetccl.sync(..., name=...)."
                )
            if entry.layout != layout and not entry.warned:
                entry.warned = True
                _log.warning(
                    "%s: sharded differently than in the first program that synced these arrays; they are brought into "
                    "the first layout, on which the clusters agreed. If all clusters changed, give the syncs different "
                    "names: hetccl.sync(..., name=...).",
                    spec.text,
                )
            return entry.layout, entry.token

    def nothing(self, spec: Spec) -> None:
        """Takes note of a sync without arrays: nothing is exchanged, but clusters that have arrays there must learn."""
        with self._lock:
            entry = self._entries.setdefault(spec.key, _Entry(spec, Layout((), ()), None))
            entry.taught = True
        self._publish([entry])

    def keep_error(self, error: HetcclError) -> None:
        """Keeps an error that is about to be raised through a compiler, which reports its text only."""
        with self._lock:
            self._error = error

    def take_error(self) -> HetcclError | None:
        """The error kept last, once."""
        with self._lock:
            error, self._error = self._error, None
            return error

    def finish(self, keys: Iterable[int]) -> bool:
        """Waits for the other clusters' layouts of the syncs of a program, and tells the engine the plans.

        Args:
          keys: the syncs of the program that has been compiled.

        Returns:
          Whether the program can be run. If not, it was compiled by another process (it comes from a cache), for a
          layout that is not known here.

        Raises:
          AgreementError: another cluster syncs something else; names both and the first array that differs.
          RendezvousError: another cluster did not compile it within the arrival timeout.
        """
        keys = list(keys)
        with self._lock:
            if any(key not in self._entries for key in keys):
                return False
            waiting = [self._entries[key] for key in keys if not self._entries[key].taught]
        self._publish(waiting)
        for entry in waiting:
            layouts = self._collect(entry)
            self._world.engine.set_program(entry.spec.key, entry.spec.text)
            for lesson in lessons(entry.spec, layouts, self._world.cluster, self._world.local_ranks):
                teach(self._world, lesson)
            entry.taught = True
        return True

    def _publish(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            with self._lock:
                if entry.published:
                    continue
                entry.published = True
            described = {"spec": entry.spec.described, **entry.layout.packed()}
            self._world.control.publish(_channel(entry.spec), described)

    def _collect(self, entry: _Entry) -> list[Layout]:
        """Every cluster's layout of a sync."""
        world = self._world
        members = world.control.members
        first = {m.cluster: m.index for m in reversed(members)}  # each cluster's first process
        siblings = [m.index for m in members if m.cluster == world.cluster]
        answers = self._answers(entry.spec, [*(i for c, i in first.items() if c != world.cluster), *siblings])
        mine = Layout.unpacked(answers[world.control.me])
        for other in siblings:
            if Layout.unpacked(answers[other]) != mine:
                raise AgreementError(
                    f"{entry.spec.text}: the processes {members[world.control.me].name} and {members[other].name} of one "
                    "cluster run it on different devices or with different shardings; all processes of a cluster must "
                    "run one program over arrays on all of its devices."
                )
        return [
            mine if info.index == world.cluster else Layout.unpacked(answers[first[info.index]])
            for info in world.clusters
        ]

    def _answers(self, spec: Spec, members: Sequence[int]) -> dict[int, Any]:
        """What these members published of a sync; an error soon if one of them syncs other things instead."""
        control, bound = self._world.control, self._world.config.arrival_timeout
        try:
            return control.collect(_channel(spec), members, min(_GRACE_S, bound))
        except RendezvousError:
            with self._lock:
                found = self._difference(spec, members)
            if found is not None:
                raise AgreementError(found) from None
        try:
            return control.collect(_channel(spec), members, max(bound - _GRACE_S, 0.0))
        except (RendezvousError, PeerLostError) as error:
            raise type(error)(f"{spec.text}: {error}") from None

    def _difference(self, spec: Spec, members: Sequence[int]) -> str | None:
        """What a member that has not published a sync published instead, as an error."""
        world = self._world
        for member in members:
            said = world.control.published(_PREFIX, member)
            if _channel(spec) in said:
                continue
            for channel, theirs in said.items():
                if int(channel.removeprefix(_PREFIX), 16) in self._entries or (member, channel) in self._reported:
                    continue
                self._reported.add((member, channel))
                here, there = world.control.members[world.control.me], world.control.members[member]
                names = (here.name, there.name)
                if here.cluster != there.cluster:
                    names = (here.cluster_name, there.cluster_name)
                text = difference(spec.described, theirs["spec"], *names)
                if not theirs["spec"]["items"]:  # nobody waits there
                    world.fail("agreement", text)
                return text
        return None


_PREFIX = "sync/"


def _channel(spec: Spec) -> str:
    return f"{_PREFIX}{spec.key:016x}"


def signed(number: int) -> int:
    """An unsigned 64-bit number's bit pattern as a signed one, as attributes hold it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], here: str, there: str) -> str:
    """What two clusters' syncs (``Spec.described``) differ in, first difference first."""
    pairs = itertools.zip_longest(ours["items"], theirs["items"], fillvalue="no array")
    found = next((p for p in pairs if p[0] != p[1]), None)
    forms = ours.get("wire_dtype"), theirs.get("wire_dtype")
    buckets = ours.get("buckets", []), theirs.get("buckets", [])
    if forms[0] != forms[1]:  # the arrays differ because of it
        what = f"wire_dtype = {forms[0]} in {here!r}, {forms[1]} in {there!r}"
    elif found is not None:
        what = f"{found[0]} in {here!r}, {found[1]} in {there!r}"
    elif buckets[0] != buckets[1]:
        return _other_buckets(*buckets, here, there)
    else:
        what = ", ".join(
            f"{k} = {ours[k]!r} in {here!r}, {theirs[k]!r} in {there!r}" for k in ours if ours[k] != theirs[k]
        )
    return (
        f"sync: {here!r} and {there!r} sync different things: {what}. Every cluster must run the same syncs, of "
        "trees with the same paths, global shapes and dtypes (arrays without elements do not count)."
    )


def _other_buckets(ours: Sequence[Any], theirs: Sequence[Any], here: str, there: str) -> str:
    """What two clusters' buckets of equal arrays differ in."""
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
    n, (mine, other) = next((n, p) for n, p in enumerate(pairs) if p[0] != p[1])
    return (
        f"sync: {here!r} and {there!r} sync the same arrays in different buckets ({len(ours)} and {len(theirs)}): bucket "
        f"{n} is {mine} in {here!r}, {other} in {there!r}. Either buckets= differs, or the programs compute the gradients "
        "in another order, which a number of buckets follows: name the buckets then, alike in all clusters: "
        "hetccl.sync(..., buckets=('head', 'layers', ...))."
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
