"""Who goes on when a world is formed anew. Pure: what the processes say is an argument.

What is said only grows: a cluster that one process takes for gone is gone for everybody who listens to it. So however
many clusters die meanwhile, those left come to say the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl.rendezvous.member import Member


@dataclasses.dataclass(frozen=True)
class Word:
    """What one process says.

    Attributes:
      gone: the clusters (indices) that it goes on without.
      asked: the clusters (names) that its program named, or None: whoever is left.
      record: facts about it for the new world, with its new public key.
      attempt: how often it has tried in this world.
    """

    gone: frozenset[int]
    asked: tuple[str, ...] | None = None
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attempt: int = 1

    def packed(self) -> list[Any]:
        """The word as it travels."""
        return [sorted(self.gone), self.asked and list(self.asked), dict(self.record), self.attempt]

    @classmethod
    def unpacked(cls, value: Any) -> Word:
        """The word that travelled."""
        gone, asked, record, attempt = value
        names = None if asked is None else tuple(map(str, asked))
        return cls(frozenset(map(int, gone)), names, dict(record), int(attempt))


def merged(gone: Iterable[int], words: Mapping[int, Word], members: Sequence[Member]) -> frozenset[int]:
    """The clusters that are gone, with what the others say.

    Who is gone has no say: of two clusters that take each other for lost, the one that the lowest process believes stays.

    Args:
      gone: the clusters that this process takes for gone.
      words: what the processes say, by index.
      members: all processes of the old world.
    """
    found = frozenset(gone)
    for index in sorted(words):
        if members[index].cluster not in found:
            found |= words[index].gone
    return found


def living(gone: Iterable[int], members: Sequence[Member]) -> list[Member]:
    """The processes of the clusters that are not gone."""
    without = frozenset(gone)
    return [member for member in members if member.cluster not in without]


def undecided(gone: frozenset[int], words: Mapping[int, Word], members: Sequence[Member]) -> list[Member]:
    """The living processes that do not say the same yet, or nothing."""
    return [m for m in living(gone, members) if m.index not in words or words[m.index].gone != gone]


def differing(words: Mapping[int, Word], members: Sequence[Member]) -> str | None:
    """The first difference between the clusters that the programs named, or None."""
    first = min(words, default=None)
    for index in sorted(words):
        if words[index].asked != words[first if first is not None else index].asked:
            assert first is not None
            sides = ((members[i].name, _named(words[i].asked)) for i in (first, index))
            return ", but ".join(f"{name} says clusters={asked}" for name, asked in sides)
    return None


def _named(asked: tuple[str, ...] | None) -> str:
    return "None" if asked is None else repr(",".join(asked))
