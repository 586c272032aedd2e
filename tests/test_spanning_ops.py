"""What each operation returns, for every dtype and size."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("ops", "dtypes", "sizes", "surface", "collectives", "groups", "broadcasts")
def test_ops(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
