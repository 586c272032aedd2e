"""Derivatives across clusters equal those of one world."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("autodiff")
def test_autodiff(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
