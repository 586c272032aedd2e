"""With a world initialised, programs over non-spanning axes lower and compile to the text of stock JAX."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("stock_hlo")
def test_stock_hlo(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
