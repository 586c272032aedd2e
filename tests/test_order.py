"""Programs whose exchanges a compiler would reorder, merge, drop or hoist keep one order."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("order")
def test_order(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
