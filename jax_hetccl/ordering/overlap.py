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
    window: list[int] = []  # heavy operations of this round that no start has waited for so far
    started = False
    for step in steps:
        match step:
            case Run(i) if started and i in heavy:
                window.append(i)
            case Start(bucket):
                started = True
                waited = ancestors(items, [n for e in bucket for n in items[e].needs])
                window = [i for i in window if i not in waited]
            case Done(bucket) if started:
                below = {i: ancestors(items, items[i].needs) for i in window}
                behind.update(i for i in window if not below[i] & set(window))
                before[bucket] = tuple(i for i in window if not any(i in below[j] for j in window))
                window, started = [], False
            case _:
                pass
    return Ties(frozenset(behind), before)


def ancestors(items: Sequence[Item], of: Collection[int]) -> set[int]:
    """The operations given and all that they need, directly or not."""
    found: set[int] = set()
    todo = list(of)
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo.extend(items[i].needs)
    return found
