"""Drawn operations, shapes, dtypes and axis layouts give the oracle's result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.drawn import AROUND
from harness.case import CASES, DATA, DATA_MODEL, MeshSpec
from harness.judge import check
from harness.layout import Layout
from harness.pool import Pool, Run

_DTYPES = ("float32", "int32", "bfloat16", "float16", "bool", "int8", "uint8", "complex64", "float8_e5m2")
_NO_ORDER = ("complex64",)


def _steps(dtype: str, axes: tuple[tuple[str, ...], ...]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One to four reductions that lax accepts for this dtype."""
    ops = ("psum", "pmean") if dtype in _NO_ORDER else ("psum", "pmean", "pmax", "pmin")
    step = st.fixed_dictionaries(
        {"op": st.sampled_from(ops), "axes": st.sampled_from(axes), "around": st.sampled_from(AROUND)}
    )
    return st.lists(step, min_size=1, max_size=4)


@st.composite
def _programs(draw: st.DrawFn, spec: MeshSpec) -> dict[str, Any]:
    dtype = draw(st.sampled_from(_DTYPES))
    axes = (("data",),) if spec == DATA else (("data",), ("model",), ("data", "model"), ("model", "data"))
    shape = draw(st.lists(st.integers(0, 9), max_size=3) | st.lists(st.sampled_from((1, 300, 1021)), max_size=2))
    return {
        "dtype": dtype,
        "shape": shape,
        "seed": draw(st.integers(0, 99)),
        "steps": draw(_steps(dtype, axes)),
    }


_WORLDS = (("2/1", "shm", DATA), ("2/1/2", "tcp", DATA), ("4/2", "tcp", DATA_MODEL))


@pytest.mark.parametrize(("layout", "transport", "spec"), _WORLDS, ids=[f"{a}-{b}" for a, b, _ in _WORLDS])
@given(data=st.data(), vma=st.booleans(), api=st.sampled_from(("lax", "hetccl")))
def test_drawn(
    layout: str, transport: str, spec: MeshSpec, data: st.DataObject, vma: bool, api: str, pool: Pool
) -> None:
    params = data.draw(_programs(spec))
    case = dataclasses.replace(CASES["drawn.program"], exact=params["dtype"] != "float16")
    check(pool, pool.world(Layout.parse(layout), transport, spec), Run(case, vma, api, spec, params))
