"""Derivatives across clusters equal those of one world."""

import pytest

from harness.batches import Batches
from harness.cells import Cell


@pytest.mark.batched("autodiff")
def test_autodiff(cell: Cell, batches: Batches) -> None:
    batches.check(cell)
