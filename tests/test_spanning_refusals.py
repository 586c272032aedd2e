"""What this version does not do is refused on every cluster."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("refusals")
def test_refusals(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
