"""Which computation must stand between starts and dones, for compilers that schedule a done as soon as it can run.

XLA on a CPU runs whatever is ready while an exchange is under way. On a GPU it fixes one order of launches per device,
and a done in front of computation that does not need it holds the stream for nothing. The starts of a round pull the
computation that they wait for in front of them; what is left is tied with :class:`Ties`: a computation behind the last
start before it, and the round's first done behind that computation. Pure: no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jax_hetccl.ordering.schedule import Done, Item, Run, Start, Step


@dataclasses.dataclass(frozen=True)
class Ties:
    """What is tied to the chain of exchanges.

    Attributes:
      behind_start: operations that take the chain as it is when they run.
      before_done: for the first done of a round, operations whose results the chain must wait for.
    """

    behind_start: frozenset[int]
    before_done: dict[tuple[int, ...], tuple[int, ...]]


def ties(items: Sequence[Item], steps: Sequence[Step], heavy: Collection[int]) -> Ties:
    """Finds what has to be tied in a scheduled block.

    Args:
      items: the block's operations.
      steps: their schedule.
      heavy: those worth overlapping with a transfer.

    Returns:
      As few ties as keep every heavy operation of a round between a start and the first done.
    """
    if not heavy:
        return Ties(frozenset(), {})
    behind: set[int] = set()
    before: dict[tuple[int, ...], tuple[int, ...]] = {}
    waited: set[int] = set()  # what a start has waited for so far: it has run, so it is in no later window
    window: list[int] = []  # heavy operations of this round that no start has waited for so far
    ran: list[int] = []  # all operations of this round; what lies between two of the window is among them
    started = False
    for step in steps:
        match step:
            case Run(i) if started:
                ran.append(i)
                if i in heavy:
                    window.append(i)
            case Start(bucket):
                started = True
                if new := _reach(items, [n for e in bucket for n in items[e].needs], waited):
                    window = [i for i in window if i not in new]
            case Done(bucket) if started:
                inside = set(window)
                below: set[int] = set()  # of an operation of the window
                above: set[int] = set()
                for i in ran:
                    if any(n in inside or n in below for n in items[i].needs):
                        below.add(i)
                for i in reversed(ran):
                    if i in inside or i in above:
                        above.update(items[i].needs)
                behind.update(inside - below)
                before[bucket] = tuple(i for i in window if i not in above)
                window, ran, started = [], [], False
            case _:
                pass
    return Ties(frozenset(behind), before)


def _reach(items: Sequence[Item], of: Collection[int], known: set[int]) -> set[int]:
    """The operations given and all that they need, directly or not, without those in ``known``, which they are added
    to."""
    found: set[int] = set()
    todo = list(of)
    while todo:
        i = todo.pop()
        if i not in known:
            known.add(i)
            found.add(i)
            todo.extend(items[i].needs)
    return found
