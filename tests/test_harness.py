"""The harness finds what it is there to find: wrong values, unequal replicas, missing ranks, hangs, deaths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from harness import platforms
from harness.case import CASES, DATA, MeshSpec
from harness.judge import _differs, _without_places, check
from harness.layout import Layout
from harness.pool import Pool, Run, WorkerGoneError, World


class _BarePool(Pool):
    """A pool whose worlds share nothing and need no jax_hetccl."""

    def world(self, layout: Layout, transport: str, spec: MeshSpec = DATA, pythons: tuple[str, ...] = ()) -> World:
        key = (layout, transport, spec.group, pythons)
        if self._world is None or key != self._key:
            self.discard()
            self._world, self._key = World(layout, transport, joined=False), key
        return self._world


@pytest.fixture(scope="module")
def bare(pool: Pool) -> Iterator[_BarePool]:
    pool.retire()
    made = _BarePool()
    yield made
    made.discard()
    made.close()


def _check(bare: _BarePool, name: str, layout: str = "2/1") -> None:
    case = CASES["alone." + name]
    for vma in case.vma[:1]:
        check(bare, bare.world(Layout.parse(layout), "tcp"), Run(case, vma))


def test_layout_text() -> None:
    layout = Layout.parse("1+2/4")
    assert (str(layout), layout.devices, layout.names()) == ("1+2/4", (3, 4), "left:2,right:1")
    assert layout.members() == [(0, 0, 1), (0, 1, 2), (1, 0, 4)]


def test_equal_results_pass(bare: _BarePool) -> None:
    _check(bare, "rows")


@pytest.mark.parametrize("name", ["grid", "grid_transposed"])
def test_placement_on_two_axes(bare: _BarePool, name: str) -> None:
    _check(bare, name, "4/2")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong_value", "rank 0 .left/0.: 3 of 3 elements differ"),
        ("wrong_replica", "rank 2 .right/0.: bits differ"),
        ("never_refuses", "right/0: accepted; expected UnsupportedError"),
        ("raises_in_one_cluster", "right/0: raised (.|\n)*not here"),
    ],
)
def test_differences_are_found(bare: _BarePool, name: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        _check(bare, name)


@pytest.mark.parametrize(("name", "text"), [("hangs", "did not answer within"), ("dies", "ended with status 7")])
def test_a_lost_worker_is_reported_and_replaced(bare: _BarePool, name: str, text: str) -> None:
    with pytest.raises(WorkerGoneError, match=text):
        _check(bare, name)
    _check(bare, "rows")


@pytest.mark.parametrize(
    ("want", "got", "differs"),
    [
        (np.float32([1, 2]), np.float32([1, 2.00001]), False),
        (np.float32([1, 2]), np.float32([1, 2.001]), True),
        (np.int32([1, 2]), np.int32([1, 3]), True),
        (np.uint64([2**63]), np.uint64([2**63 + 1]), True),
        (np.float32([np.nan]), np.float32([np.nan]), False),
        (np.float32([np.nan]), np.float32([0]), True),
        (np.float32([np.inf]), np.float32([-np.inf]), True),
        (np.complex64([1 + 1j]), np.complex64([1 - 1j]), True),
        (np.bool_([True]), np.bool_([False]), True),
        (np.zeros((0, 3)), np.zeros((3, 0)), True),
    ],
)
def test_tolerances(want: np.ndarray, got: np.ndarray, differs: bool) -> None:
    assert (_differs(want, got) is not None) == differs


def test_places_in_the_source_are_not_part_of_a_program() -> None:
    text = 'HloModule f\n\nFileNames\n1 "a.py"\n\nStackFrames\n1 {x}\n\nENTRY {\n  add, metadata={op_name="f" stack_frame_id=3}\n}'
    assert _without_places(text) == ["HloModule f", "", "", "", "ENTRY {", '  add, metadata={op_name="f"}', "}"]


def test_platforms_of_a_layout() -> None:
    one = {"cuda": 1, "rocm": 0}
    layout = Layout.parse
    assert platforms.parse(" cuda, cpu") == ("cuda", "cpu") and platforms.parse("") == ()
    with pytest.raises(ValueError, match="valid: cpu, cuda, rocm"):
        platforms.parse("cuda,tpu")
    assert platforms.missing(layout("1/1"), ("cuda", "cuda"), one) is None
    assert platforms.missing(layout("1/4"), ("cuda", "cpu"), one) is None
    assert "needs 2 cuda devices in one cluster, this machine has 1" in str(
        platforms.missing(layout("2/1"), ("cuda", "cpu"), one)
    )
    assert "this machine has 0" in str(platforms.missing(layout("1/1"), ("cuda", "rocm"), one))
    assert "has 3 clusters" in str(platforms.missing(layout("1/1/1"), ("cuda", "cpu"), one))


def test_processes_are_put_on_their_platform(monkeypatch) -> None:
    monkeypatch.setattr(platforms, "_found", ("cuda", "cuda"))
    monkeypatch.setattr(platforms, "count", lambda platform: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shown(text: str) -> list[str]:
        layout = Layout.parse(text)
        return [platforms.environment(layout, c, p)["CUDA_VISIBLE_DEVICES"] for c, p, _ in layout.members()]

    assert shown("1/1") == ["0", "1"]
    assert shown("1+1/1") == ["0", "1", "0"]  # a cluster's devices differ, clusters share
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert shown("1/1") == ["4", "7"]
    with pytest.raises(pytest.skip.Exception, match="needs 3 cuda devices"):
        shown("3/1")
    monkeypatch.setattr(platforms, "_found", ("cuda", "cpu"))
    assert platforms.environment(Layout.parse("1/2"), 1, 0) == {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
