"""What each operation returns, for every dtype and size."""

import pytest

from harness.batches import Batches
from harness.cells import Cell


@pytest.mark.batched("ops", "dtypes", "sizes", "surface", "collectives", "groups", "broadcasts")
def test_ops(cell: Cell, batches: Batches) -> None:
    batches.check(cell)
