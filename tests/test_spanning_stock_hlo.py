"""Program texts: stock JAX's where no axis spans, and equal in all processes of one cluster."""

from __future__ import annotations

import pytest

from harness.case import CASES
from harness.cells import Cell
from harness.judge import text_differences
from harness.layout import Layout
from harness.pool import Pool, Run, World


@pytest.mark.cases("stock_hlo")
def test_stock_hlo(cell: Cell, pool: Pool) -> None:
    """With a world initialised, programs over other axes lower and compile to the text of stock JAX."""
    cell.check(pool)


@pytest.mark.parametrize("vma", [True, False])
def test_processes_of_one_cluster_compile_the_same(pool: Pool, vma: bool) -> None:
    """Autotuning and the sharing of binaries inside a cluster depend on it."""
    world = pool.world(Layout.parse("1+1/1"), "tcp")
    first, second, _ = world.run(Run(CASES["stock_hlo.spanning"], vma))
    assert not first.error, first.error
    assert not second.error, second.error
    problems = text_differences(first, second)
    assert not problems, "\n".join(problems)


def test_after_shutdown_jax_is_stock_again(pool: Pool) -> None:
    pool.retire()
    with World(Layout.parse("2/2"), "shm") as world:
        run = Run(CASES["ops.reduce[psum]"], True)
        assert not any(r.error for r in world.run(run))
        assert not any(r.error for r in world.request(15, op="shutdown"))
        run = Run(CASES["stock_hlo.over_data"], True)
        stock = pool.stock(2).run(run, (2,))
        for reply in world.run(run):
            problems = text_differences(stock, reply)
            assert not problems, "\n".join(problems)
