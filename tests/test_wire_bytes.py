"""Every collective sends the bytes that docs/algorithms.md says, and no more."""

from __future__ import annotations

import pytest

from harness.asserted import run_asserted
from harness.case import Case, module
from harness.pool import Pool

CASES = module("wire")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("layout", "transport"), [("2/1", "shm"), ("2/1/2", "tcp")])
def test_bytes(pool: Pool, layout: str, transport: str, case: Case) -> None:
    run_asserted(pool, layout, transport, case, vma=False)
