"""hetccl.local(), pmap over a spanning axis, donation, and the names of exchanges."""

from __future__ import annotations

import pytest

from harness.asserted import run_asserted
from harness.case import CASES, Case, module
from harness.ends import all_failed
from harness.judge import text_differences
from harness.layout import Layout
from harness.pool import Pool, Run, World

OWN = [case for case in module("local") if "local" in case.tags]
STOCK = [(case, vma) for case in module("local") if "local-text" in case.tags for vma in case.vma]


@pytest.mark.parametrize(("case", "vma"), STOCK, ids=lambda v: v.name if isinstance(v, Case) else f"vma={v}")
def test_local_is_stock(pool: Pool, case: Case, vma: bool) -> None:
    """In every cluster the program and its values are those of stock JAX with the cluster's devices alone."""
    layout = Layout.parse("4/2")
    run = Run(case, vma)
    replies = pool.world(layout, "shm").run(run)
    for reply in replies:
        devices = layout.devices[reply.cluster]
        problems = text_differences(pool.stock(devices).run(run, (devices,)), reply)
        assert not problems, "\n".join([reply.label, *problems])


@pytest.mark.parametrize(
    ("case", "layout", "transport", "vma"),
    [
        (case, layout, transport, vma)
        for layout, transport in (("4/2", "shm"), ("2/1/2", "tcp"))
        for case in OWN
        for vma in case.vma
    ],
    ids=lambda v: v.name if isinstance(v, Case) else str(v),
)
def test_local(pool: Pool, case: Case, layout: str, transport: str, vma: bool) -> None:
    run_asserted(pool, layout, transport, case, vma)


def test_errors_name_the_operation(pool: Pool) -> None:
    """Op, axis, type and the user's own names."""
    pool.retire()
    with World(Layout.parse("2/1"), "shm", arrival_timeout=3.0) as world:
        run = Run(CASES["local.named"], vma=False)
        assert not any(r.error for r in world.run(run))
        world.ask([run, None], each_device=True)
        all_failed(world.answers(12), "ExchangeTimeoutError", r"psum/data float32\[1,4\] \S*train_step/grads", "right")
