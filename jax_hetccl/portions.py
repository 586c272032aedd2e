"""How many rows of a global batch each cluster takes. Pure: sizes and times are arguments.

Clusters take contiguous parts, in rank order, and each part is a multiple of what the cluster splits it into.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax_hetccl._errors import ConfigError


def portions(op: str, total: int, weights: Sequence[float] | None, multiples: Sequence[int]) -> tuple[int, ...]:
    """Splits ``total`` rows in proportion to ``weights``, as nearly as the multiples allow.

    The largest number of rows per weight is as small as it can be, then the second largest, and so on: with rows per second
    as weights the cluster that ends last ends as early as possible.

    Args:
      op: who asks, for errors.
      total: rows.
      weights: one for each cluster; None: every unit of ``multiples`` gets equally many rows.
      multiples: each cluster's part is a multiple of this, and not zero.

    Returns:
      Rows of each cluster; together ``total``.

    Raises:
      ConfigError: wrong weights or multiples, or there is no such split; names sizes near by that have one.

    Example:
      >>> portions("batch_sizes", 12, None, (2, 1))
      (8, 4)
      >>> portions("batch_sizes", 12, (1.0, 1.0), (2, 1))
      (6, 6)
    """
    _check(op, total, weights, multiples)
    units = sum(multiples)
    if weights is None:
        if total % units:
            above = total - total % units + units
            use = f"{above - units} or {above}" if above > units else f"{units}"
            raise ConfigError(
                f"{op}: {total} rows do not give every one of {units} devices equally many; use {use} rows, or give "
                "weights= and weigh the means (hetccl.sync(..., weight=rows))"
            )
        return tuple(m * (total // units) for m in multiples)
    if total < units:
        raise ConfigError(
            f"{op}: {total} rows are fewer than the {units} that the clusters need at least "
            f"({' + '.join(map(str, multiples))}: one for each device)"
        )
    found = _nearest(total, tuple(weights), tuple(multiples))
    if found is None:
        common = math.gcd(*multiples)
        low = total - total % common
        hint = f"{low} or {low + common}" if total % common else f"a multiple of {units}"
        raise ConfigError(
            f"{op}: {total} rows cannot be split into multiples of {', '.join(map(str, multiples))}; use {hint}"
        )
    return found


def balanced(batches: Sequence[int], seconds: Sequence[float], multiples: Sequence[int]) -> tuple[int, ...]:
    """Splits the same rows anew so that all clusters' steps take equally long.

    A step's time is taken to be proportional to its rows. Where a part of it is not, calls with new measurements
    approach the balance step by step.

    Args:
      batches: the rows of each cluster when the times were measured.
      seconds: each cluster's time for its rows.
      multiples: as in :func:`portions`.

    Returns:
      New rows of each cluster; the same number together.

    Example:
      >>> balanced((8, 8), (0.1, 0.3), (2, 1))
      (12, 4)
    """
    return portions("balance", sum(batches), [n / s for n, s in zip(batches, seconds, strict=True)], multiples)


def process_part(sizes: Sequence[int], cluster: int, owners: Sequence[int], process: int) -> slice | None:
    """Returns the rows that one process of a cluster loads.

    Args:
      sizes: rows of each cluster.
      cluster: which one.
      owners: the process of each of the cluster's devices, in rank order: 0, 0, 1, 1.
      process: which of them.

    Returns:
      A slice of all rows; None if the cluster has several processes and its rows do not divide among their devices.

    Example:
      >>> process_part((64, 32), 1, (0, 0, 1, 1), 1)
      slice(80, 96, None)
    """
    start, rows = sum(sizes[:cluster]), sizes[cluster]
    if len(set(owners)) == 1:
        return slice(start, start + rows)
    if rows % len(owners):
        return None
    each, before = rows // len(owners), sum(owner < process for owner in owners)
    return slice(start + each * before, start + each * (before + list(owners).count(process)))


def _check(op: str, total: int, weights: Sequence[float] | None, multiples: Sequence[int]) -> None:
    if total < 1:
        raise ConfigError(f"{op}: a batch of {total} rows; it has one at least")
    if any(m < 1 for m in multiples):
        raise ConfigError(f"{op}: multiples={tuple(multiples)}; each is 1 at least")
    if weights is None:
        return
    if len(weights) != len(multiples):
        raise ConfigError(
            f"{op}: {len(weights)} weights, but there are {len(multiples)} clusters now; give one for each cluster"
        )
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ConfigError(f"{op}: weights={tuple(weights)}; each is a positive number")


@functools.lru_cache(maxsize=64)  # asked in every step, and up to seconds of work for four odd clusters
def _nearest(total: int, weights: tuple[float, ...], multiples: tuple[int, ...]) -> tuple[int, ...] | None:
    """The best split; None if there is none.

    Two clusters can exchange rows in steps of the least common multiple, so that the best split is within some such steps
    of the exact one. Dynamic programming over the rows given away so far.
    """
    window = len(multiples) * math.lcm(*multiples)
    whole = sum(weights)
    best: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: ((), ())}
    for c, (weight, multiple) in enumerate(zip(weights, multiples, strict=True)):
        exact = total * weight / whole
        first = max(1, math.floor((exact - window) / multiple))
        last = max(first, math.ceil((exact + window) / multiple))
        rest = sum(multiples[c + 1 :])
        following: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
        for given, (loads, parts) in best.items():
            for k in range(first, last + 1):
                if (now := given + k * multiple) + rest > total:
                    break
                load = k * multiple / weight
                candidate = (tuple(sorted((*loads, load), reverse=True)), (*parts, k * multiple))
                if now not in following or candidate < following[now]:
                    following[now] = candidate
        best = following
    return best[total][1] if total in best else None
