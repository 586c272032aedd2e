"""The loader that docs/training.md shows, as it stands there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_hetccl.portions import portions

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "training.md"


def _documented() -> Callable[..., Any]:
    found = [
        code for code in re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL) if "import grain" in code
    ]
    assert len(found) == 1
    names: dict[str, Any] = {}
    exec(found[0], names)
    return names["batches"]


@pytest.mark.parametrize("weights", [None, (3.0, 1.0, 1.0)])
def test_the_global_order_does_not_depend_on_the_clusters(weights: tuple[float, ...] | None) -> None:
    pytest.importorskip("grain", reason="the extra [test] brings it")
    batches, source, n = _documented(), np.arange(100, 120), 12
    whole = batches(source, n, slice(0, n))
    ends = np.cumsum([0, *portions("process_slice", n, weights, (1, 1, 2))]).tolist()
    parts = [batches(source, n, slice(a, b)) for a, b in itertools.pairwise(ends)]
    for step in range(5):  # three passes over the data
        assert np.concatenate([part[step] for part in parts]).tolist() == whole[step].tolist()
    seen = np.concatenate([whole[step] for step in range(5)])
    for first in (0, 20, 40):
        assert sorted(seen[first : first + 20].tolist()) == source.tolist(), "each pass has every row once"
    assert not np.array_equal(seen[:20], seen[20:40])
    ahead = iter(parts[0].to_iter_dataset())
    assert [next(ahead).tolist() for _ in range(3)] == [parts[0][step].tolist() for step in range(3)]
