"""The verdict on one run: equal to the oracle, equal on every replica, or refused as the table says."""

from __future__ import annotations

import difflib
import re
from typing import Any

import ml_dtypes
import numpy as np

from harness import platforms
from harness.case import Case
from harness.pool import Pool, Reply, Run, WorkerGoneError, World
from harness.results import Leaf

# Relative tolerance per dtype: a few units in the last place, for sums in another order.
_RTOL = {
    "float64": 1e-12, "complex128": 1e-12, "float32": 2e-5, "complex64": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2,
}  # fmt: skip


def check(pool: Pool, world: World, run: Run, compiler_differs: bool = False) -> None:
    """Runs a case in the oracle and in a world, and fails with every difference found.

    Args:
        pool: gives the oracle; a world that is not well afterwards is discarded.
        world: where to run.
        run: what to run.
        compiler_differs: the clusters have different JAX versions or platforms, so replicas computed after the exchange may differ
            in rounding unless the case is `exact`.
    """
    try:
        replies = world.run(run)
    except WorkerGoneError:
        pool.discard()
        raise
    try:
        problems = _problems(pool, world, run, replies, compiler_differs)
    finally:
        if any(r.health for r in replies) or _uneven(replies):
            pool.discard()
    if problems:
        head = f"{run.case.name} vma={run.vma} api={run.api} on {world.layout} over {world.transport}"
        raise AssertionError("\n".join([head, *problems]))


def _uneven(replies: list[Reply]) -> bool:
    """Some raised and some did not: those that did not may have left exchanges behind."""
    return len({r.error is None for r in replies}) > 1


def _problems(pool: Pool, world: World, run: Run, replies: list[Reply], compiler_differs: bool) -> list[str]:
    case = run.case
    if "hlo" in case.tags:
        return [p for r in replies for p in _stock_text(pool, world, run, r)]
    if case.refused:
        return [p for r in replies for p in _refusal(case, r)]
    oracle = pool.oracle.run(run, world.layout.devices)
    if run.vma in case.rejects:
        return _rejection(oracle, replies)
    return differences(case, oracle, replies, compiler_differs)


def differences(case: Case, oracle: Reply, replies: list[Reply], compiler_differs: bool = False) -> list[str]:
    """Everything in which the replies of a world's processes differ from the oracle's, or from each other's."""
    if oracle.error:
        return [f"the oracle itself failed: {oracle.error['trace']}"]
    failed = [f"{r.label}: raised {r.error['trace']}" for r in replies if r.error]
    if failed:
        return failed
    bitwise, values = case.exact or not compiler_differs, not case.replicas_only
    rounded = case.rounded if compiler_differs or platforms.any_gpu() else ()
    return _compare(oracle, replies, values, bitwise, rounded, compiler_differs)


def _rejection(oracle: Reply, replies: list[Reply]) -> list[str]:
    """Every process must raise an error of the class of the oracle's, and send nothing before."""
    if not oracle.error:
        return ["stock JAX accepts this: the table is wrong"]
    problems = []
    for r in replies:
        if not r.error:
            problems.append(f"{r.label}: accepted, but stock JAX raises {_line(oracle.error)}")
        elif not _same_kind(oracle.error, r.error):
            problems.append(f"{r.label}: stock JAX raises {_line(oracle.error)}, here {r.error['trace']}")
        if r.raw.get("sent"):
            problems.append(f"{r.label}: sent {r.raw['sent']} bytes before it raised")
    return problems


def _same_kind(stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """The same class; what XLA's compiler does not take may be known, and said, before it is asked."""
    return ours["type"] == stock["type"] or any(
        stock["message"].startswith(compiler) and early in ours["bases"] for compiler, early in _EARLY.items()
    )


# What the compiler's errors begin with, and what says the same earlier.
_EARLY = {
    "UNIMPLEMENTED": "builtins.NotImplementedError",
    "INTERNAL: during context [hlo verifier]": "builtins.ValueError",
}


def _line(error: dict[str, Any] | None) -> str:
    return f"{error['type']}: {error['message'].splitlines()[0] if error['message'] else ''}" if error else "nothing"


def _refusal(case: Case, reply: Reply) -> list[str]:
    if reply.error is None:
        return [f"{reply.label}: accepted; expected {case.refused} with {case.says}"]
    names = [b.rsplit(".", 1)[-1] for b in reply.error["bases"]]
    missing = [s for s in case.says if s not in reply.error["message"]]
    if case.refused not in names or missing:
        return [
            f"{reply.label}: expected {case.refused} saying {case.says}, lacks {missing}; got {reply.error['trace']}"
        ]
    return []


def _stock_text(pool: Pool, world: World, run: Run, reply: Reply) -> list[str]:
    """The process's own program text against that of a stock process with as many devices."""
    devices = world.layout.devices[reply.cluster]
    stock = pool.stock(devices).run(run, (devices,))
    return text_differences(stock, reply)


def text_differences(wanted: Reply, got: Reply) -> list[str]:
    """Where the texts that two processes returned differ, as unified diffs."""
    for reply in (wanted, got):
        if reply.error:
            return [f"{reply.label} failed: {reply.error['trace']}"]
    problems = []
    for key, leaf in (wanted.leaves or {}).items():
        texts = [_without_places(t.shards[-1].tobytes().decode()) for t in (leaf, (got.leaves or {})[key])]
        if texts[0] != texts[1]:
            lines = difflib.unified_diff(*texts, wanted.label, got.label, lineterm="", n=1)
            problems.append(f"{key} text differs\n" + "\n".join(list(lines)[:60]))
    return problems


_PLACES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _without_places(text: str) -> list[str]:
    """The lines of a program text without the tables of source lines and the references to them."""
    kept, skipping = [], False
    for line in text.splitlines():
        skipping = line.strip() in _PLACES or (skipping and line.strip() != "")
        if not skipping:
            kept.append(re.sub(r" stack_frame_id=\d+", "", line))
    return kept


def _compare(
    oracle: Reply, replies: list[Reply], values: bool, bitwise: bool, rounded: tuple[str, ...], compiler_differs: bool
) -> list[str]:
    """Leaf by leaf, rank by rank: against the oracle's values, and replicas against each other bit by bit. Leaves in
    ``rounded`` may differ by a unit in the last place, from each other only where compilers do."""
    if not oracle.leaves:
        return ["there is nothing to compare: the case returns no arrays"]
    problems = []
    for key, wanted in oracle.leaves.items():
        found: dict[int, list[tuple[str, Leaf]]] = {}
        for r in replies:
            leaf = (r.leaves or {}).get(key)
            if leaf is None:
                problems.append(f"leaf {key or '(root)'}: {r.label} has {sorted(r.leaves or {})}")
                continue
            if (leaf.dtype, leaf.weak) != (wanted.dtype, wanted.weak):
                problems.append(
                    f"leaf {key or '(root)'}: {r.label} has {leaf.dtype} weak={leaf.weak}, "
                    f"oracle {wanted.dtype} weak={wanted.weak}"
                )
                continue
            for at in leaf.shards:
                found.setdefault(at, []).append((r.label, leaf))
        loose = key in rounded
        same = bitwise and not (loose and compiler_differs)
        problems += _leaf(key or "(root)", wanted, found, values, same, loose)
    return problems


def _leaf(
    key: str, wanted: Leaf, found: dict[int, list[tuple[str, Leaf]]], values: bool, bitwise: bool, loose: bool
) -> list[str]:
    if set(found) != set(wanted.shards):
        return [f"leaf {key}: ranks {sorted(found)} answered, expected {sorted(wanted.shards)}"]
    problems = []
    replicas: dict[str, tuple[str, bytes]] = {}
    for at, holders in sorted(found.items()):
        for label, leaf in holders:
            where = f"leaf {key}, rank {at} ({label})"
            problem = _differs(wanted.shards[at], leaf.shards[at], loose)
            if values and problem:
                problems.append(f"{where}: {problem}")
            data = leaf.shards[at].tobytes()
            first_where, first = replicas.setdefault(wanted.index[at], (where, data))
            if bitwise and first != data:
                problems.append(f"{where}: bits differ from the replica of {first_where}")
    return problems


def _differs(want: np.ndarray, got: np.ndarray, loose: bool = False) -> str | None:
    """What is wrong with one shard, or None; ``loose``: a unit in the last place of a short float is nothing."""
    if want.shape != got.shape:
        return f"shape {got.shape}, oracle {want.shape}"
    if want.size == 0:
        return None
    name = str(want.dtype)
    if want.dtype.kind in "biu" or name.startswith(("int", "uint")):
        bad = want.astype(np.int64) != got.astype(np.int64) if name != "uint64" else want != got
        wide_w, wide_g = want, got
    else:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        wide_w, wide_g = want.astype(wide), got.astype(wide)
        rtol = _RTOL.get(name, float(ml_dtypes.finfo(want.dtype).eps) if loose else 0.0)
        scale = np.nanmax(np.abs(np.where(np.isfinite(wide_w), wide_w, 0)), initial=0.0)
        with np.errstate(invalid="ignore"):
            bad = ~np.isclose(wide_g, wide_w, rtol=rtol, atol=rtol * scale, equal_nan=True)
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{int(bad.sum())} of {bad.size} elements differ, first at {at}: got {wide_g[at]}, oracle {wide_w[at]} ({name})"
    )
