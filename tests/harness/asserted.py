"""Runs cases in which every process judges its own result, because each is meant to get another one."""

from __future__ import annotations

from harness.case import Case
from harness.layout import Layout
from harness.pool import Pool, Run, WorkerGoneError


def run_asserted(pool: Pool, layout: str, transport: str, case: Case, vma: bool, pythons: tuple[str, ...] = ()) -> None:
    """Fails with what any process raised, and with what is wrong with the world afterwards.

    A world that is not well is discarded.

    Args:
        pool: gives the world.
        layout, transport: of the world.
        case: what to run.
        vma: the check_vma mode.
        pythons: interpreter of each cluster; the current one where missing.
    """
    world = pool.world(Layout.parse(layout), transport, pythons=pythons)
    try:
        replies = world.run(Run(case, vma))
    except WorkerGoneError:
        pool.discard()
        raise
    wrong = [f"{r.label}: {r.error['trace']}" for r in replies if r.error]
    wrong += [f"{r.label}: the world failed: {r.health['message']}" for r in replies if r.health]
    if wrong:
        pool.discard()
    assert not wrong, f"{case.name} on {layout} over {transport}\n" + "\n".join(wrong)
