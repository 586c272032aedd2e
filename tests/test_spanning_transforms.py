"""vmap, loops, branches, nested jit and ways to call, across clusters."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("transforms")
def test_transforms(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
