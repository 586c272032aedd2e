"""Groups of global indices (``axis_index_groups``): where their members are, and how rows are found among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jax_hetccl._compat import ir
from jax_hetccl.decompose.common import Site, shape_of


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of one collective.

    Attributes:
      site: the collective.
      groups: of global numbers, each exactly once.
    """

    site: Site
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(site: Site, groups: Sequence[Sequence[int]], equal: bool = True) -> Grouping:
        """Checks the groups; an error before anything is sent, the same in all clusters.

        Args:
          site: the collective.
          groups: as lax takes them.
          equal: whether they must have one size.

        Returns:
          The grouping.
        """
        numbers, ranks = sorted(i for group in groups for i in group), site.order.total
        if numbers != list(range(ranks)):
            raise ValueError(
                f"{site.text}: axis_index_groups must cover all {ranks} indices of {site.axes} exactly once, "
                f"got {[list(g) for g in groups]}"
            )
        if equal and len({len(group) for group in groups}) > 1:
            raise ValueError(
                f"{site.text}: axis_index_groups must be equally sized, got groups of {[len(g) for g in groups]}; "
                "only psum, pmax and pmin take groups of several sizes"
            )
        return Grouping(site, tuple(tuple(int(i) for i in group) for group in groups))

    @functools.cached_property
    def split(self) -> list[list[tuple[int, int]]]:
        """The groups as ``(cluster, member)``."""
        return [[self.site.order.place(i) for i in group] for group in self.groups]

    @property
    def size(self) -> int:
        """The size of each of equal groups."""
        return len(self.groups[0])

    @functools.cached_property
    def here(self) -> list[list[int]]:
        """The members in the own cluster of each group that has some."""
        parts = [[m for c, m in group if c == self.site.me] for group in self.split]
        return [part for part in parts if part]

    @property
    def crosses(self) -> bool:
        """Whether a group has members in several clusters."""
        return any(len({c for c, _ in group}) > 1 for group in self.split)

    @property
    def local(self) -> list[list[int]] | None:
        """The groups for a local collective that wants one size: the parts here, or None (all ranks) if they differ."""
        return self.here if len({len(part) for part in self.here}) == 1 else None

    @property
    def alone(self) -> bool:
        """Whether no cluster has two members of one group."""
        return all(len({c for c, _ in group}) == len(group) for group in self.split)

    @property
    def together(self) -> int:
        """The ranks that take part in a local collective over :attr:`local`."""
        return self.site.size if self.local is None else len(self.local[0])

    def seat(self, member: int) -> int:
        """A member's number among the ranks of its local collective."""
        return member if self.local is None else next(part.index(member) for part in self.local if member in part)

    def group_of(self, member: int) -> list[tuple[int, int]]:
        """The group of a member of the own cluster."""
        return next(group for group in self.split if (self.site.me, member) in group)

    def rows(self, x: ir.Value, table: Sequence[Sequence[int]]) -> ir.Value:
        """The rows of ``x`` that each member's line of ``table`` names, in that order."""
        lines, have = np.asarray(table, np.int32), np.arange(shape_of(x)[0])
        if lines.shape[1] == len(have) and (lines == have).all():
            return x
        return self.site.lowering.take_rows(x, lines, self.site.axes)

    def combined(self, values: Sequence[ir.Value], combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combines the clusters' values, in cluster order.

        A group need not have members in every cluster; where it has none, nothing arrived.
        """
        total, seen, site = None, np.zeros(self.site.size, np.bool_), self.site
        for c, value in enumerate(values):
            takes = np.array([any(k == c for k, _ in self.group_of(m)) for m in range(site.size)])
            if total is None:
                # The first cluster's value, or whatever comes first for ranks whose group has no member there.
                total = value
            else:
                kept = site.lowering.pick(takes, value, total, site.axes)
                total = site.lowering.pick(seen & takes, combine(total, value), kept, site.axes)
            seen = seen | takes
        assert total is not None
        return total
