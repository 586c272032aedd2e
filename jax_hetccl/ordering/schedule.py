"""In which order the operations of one block run, and which exchanges travel together. Pure: no JAX.

The block is given as a list of :class:`Item` in program order. :func:`schedule` answers with steps that

* start every exchange as early as its operands exist (an exchange and the cheap operations that feed only it are
  moved up to behind the last real producer, so a gradient's exchange starts inside the backward pass even where the
  program lists all of them at its end);
* group exchanges that do not depend on each other into buckets of at most ``bucket_bytes``;
* place every ``done`` behind the last ``start`` that need not wait for it, which is what lets transfers overlap with
  computation and with each other;
* keep at most ``inflight_bytes`` of started exchanges unfinished (each holds a receive buffer).

All clusters run the same program, so all of them derive the same order. Only relations that hold in every cluster
are used: program order, data dependence, and byte counts that do not depend on the cluster's size.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence


class Kind(enum.Enum):
    PLAIN = "plain"  # any operation without an exchange in it
    LIGHT = "light"  # a plain operation cheap enough to move up with the exchange it feeds
    EXCHANGE = "exchange"
    REGION = "region"  # a loop, branch, call or manual computation with exchanges inside


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One operation: which earlier items it needs, and for an exchange its size and whom it may travel with.

    An exchange of a ``stream`` has its counterpart in another program: it starts at once, alone, and keeps its place
    among the exchanges of streams and the regions, which is all that the other program can rely on.
    """

    kind: Kind
    needs: frozenset[int] = frozenset()
    nbytes: int = 0
    group: str = ""
    stream: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Run operation ``item`` (anything but an exchange) here."""

    item: int


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Start these exchanges as one bucket."""

    bucket: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """Finish the bucket; its results exist from here on."""

    bucket: tuple[int, ...]


Step = Run | Start | Done


def schedule(items: Sequence[Item], *, bucket_bytes: int, inflight_bytes: int) -> list[Step]:
    """Orders a block.

    Args:
      items: the block's operations in program order.
      bucket_bytes: a bucket is closed when the next exchange would take it above this.
      inflight_bytes: everything is finished before more than this has been started.

    Returns:
      Steps in which every item appears exactly once and after everything it needs.

    Example:
      >>> grads = [Item(Kind.PLAIN), Item(Kind.EXCHANGE, frozenset({0}), 4), Item(Kind.PLAIN, frozenset({1}))]
      >>> schedule(grads, bucket_bytes=1 << 20, inflight_bytes=1 << 30)
      [Run(item=0), Start(bucket=(1,)), Done(bucket=(1,)), Run(item=2)]
    """
    block = _Block(items, bucket_bytes, inflight_bytes)
    for i in _hoisted(items):
        block.visit(i)
    block.finish()
    return block.steps


def _hoisted(items: Sequence[Item]) -> list[int]:
    """Program order, with each exchange and its light producers moved up behind their last real producer."""
    ready: list[int] = []  # the last real producer an item waits for; for the others the item itself
    ordered = -1  # what the next exchange of a stream stays behind
    for i, item in enumerate(items):
        light = item.kind in (Kind.LIGHT, Kind.EXCHANGE)
        ready.append(max((ready[n] for n in item.needs), default=-1) if light else i)
        if item.stream:
            ready[i] = max(ready[i], ordered)
        if item.stream or item.kind is Kind.REGION:
            ordered = ready[i]
    moved: set[int] = set()
    for i in reversed(range(len(items))):
        if items[i].kind is Kind.EXCHANGE or i in moved:
            moved.add(i)
            moved.update(n for n in items[i].needs if items[n].kind is Kind.LIGHT)
    # A real producer sorts in front of what moved up behind it, since its own index is the smaller one. An exchange
    # counts as a light producer here: what depends on its result cannot start before it anyway.
    return sorted(range(len(items)), key=lambda i: (ready[i] if i in moved else i, i))


class _Block:
    """The state of one pass over a block: open buckets, started ones, and what has to wait for them."""

    def __init__(self, items: Sequence[Item], bucket_bytes: int, inflight_bytes: int):
        self.items, self.bucket_bytes, self.inflight_bytes = items, bucket_bytes, inflight_bytes
        self.steps: list[Step] = []
        self.open: dict[str, list[int]] = {}
        self.started: list[tuple[int, ...]] = []
        self.waiting: set[int] = set()  # exchanges not done yet, and everything that depends on them
        self.deferred: list[int] = []
        self.inflight = 0

    def visit(self, i: int) -> None:
        item = self.items[i]
        if item.kind is Kind.REGION:
            self.finish()
            self.steps.append(Run(i))
        elif item.needs & self.waiting or (item.stream and any(self.items[d].stream for d in self.deferred)):
            self.waiting.add(i)
            self.deferred.append(i)
        elif item.kind is Kind.EXCHANGE:
            self._add(i)
        else:
            self.steps.append(Run(i))

    def finish(self) -> None:
        """Runs everything that was put off, one round of exchanges after the other."""
        while self.waiting:
            self._round()

    def _add(self, i: int) -> None:
        item = self.items[i]
        # Both sides of a stream may send before they receive: a send that waits for its end here would wait for ever.
        while self.inflight and self.inflight + item.nbytes > self.inflight_bytes and not item.stream:
            self._round()  # may start what waited for the last one, hence the loop
        self.waiting.add(i)
        self.inflight += item.nbytes
        if item.stream:
            self._start((i,))
            return
        bucket = self.open.setdefault(item.group, [])
        if bucket and sum(self.items[b].nbytes for b in bucket) + item.nbytes > self.bucket_bytes:
            self._start(self.open.pop(item.group))
            bucket = self.open.setdefault(item.group, [])
        bucket.append(i)
        if item.nbytes >= self.bucket_bytes:
            self._start(self.open.pop(item.group))

    def _start(self, exchanges: Sequence[int]) -> None:
        bucket = tuple(exchanges)
        self.started.append(bucket)
        self.steps.append(Start(bucket))

    def _round(self) -> None:
        for group in list(self.open):
            self._start(self.open.pop(group))
        self.steps.extend(Done(bucket) for bucket in self.started)
        deferred = self.deferred
        self.started, self.deferred, self.waiting, self.inflight = [], [], set(), 0
        for i in deferred:
            self.visit(i)


def exchanges(steps: Iterable[Step]) -> list[int]:
    """The exchanges in the order in which they start."""
    return [i for step in steps if isinstance(step, Start) for i in step.bucket]
