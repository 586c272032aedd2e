"""From which step the clusters go on, and who gets it from whom. Pure: what the processes hold is an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_hetccl._errors import AgreementError


@dataclasses.dataclass(frozen=True)
class Resumption:
    """Where training goes on.

    Attributes:
      step: the last step that everybody who holds any holds; None if nobody holds any.
      root: the first cluster (an index) that holds it; 0 if none does.
      new: whether some cluster holds none, and gets the root's tree.
    """

    step: int | None
    root: int
    new: bool


def resumption(held: Sequence[tuple[str, int, Sequence[int]]]) -> Resumption:
    """Where to go on.

    Args:
      held: of every process its name, its cluster (an index), and the steps that it holds.

    Raises:
      AgreementError: there is no step that all hold who hold any; or only a part of a cluster holds any. Says who holds what.

    Example:
      >>> resumption([("left/0", 0, []), ("right/0", 1, [6, 7]), ("third/0", 2, [5, 6])])
      Resumption(step=6, root=1, new=True)
    """
    by_cluster: dict[int, list[frozenset[int]]] = {}
    for _, cluster, steps in held:
        by_cluster.setdefault(cluster, []).append(frozenset(steps))
    old = {cluster: steps for cluster, steps in by_cluster.items() if any(steps)}
    if not old:
        return Resumption(None, 0, new=True)
    common = frozenset.intersection(*(steps for every in old.values() for steps in every))
    if not common:
        raise AgreementError(
            f"resume: no step is held by all processes that hold any: {_listed(held)}. Keep more of them "
            "(Snapshots(depth=...)) where clusters can be further apart than one kept step, and the same steps everywhere; "
            "here, start again from a checkpoint."
        )
    return Resumption(max(common), min(old), new=len(old) < len(by_cluster))


def _listed(held: Sequence[tuple[str, int, Sequence[int]]]) -> str:
    return ", ".join(f"{name} holds {', '.join(map(str, sorted(steps))) or 'none'}" for name, _, steps in held)


def dropped(steps: Mapping[int, object], depth: int) -> list[int]:
    """The steps that need not be kept any longer, oldest first."""
    return sorted(steps)[: max(len(steps) - depth, 0)]
