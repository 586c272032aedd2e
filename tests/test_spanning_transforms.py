"""vmap, loops, branches, nested jit and ways to call, across clusters."""

import pytest

from harness.batches import Batches
from harness.cells import Cell


@pytest.mark.batched("transforms")
def test_transforms(cell: Cell, batches: Batches) -> None:
    batches.check(cell)
