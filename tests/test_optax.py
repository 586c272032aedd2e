"""hetccl.optax over clusters that shard the same arrays differently, against numpy and stock optax."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from test_sync import Table, judge, run

from harness.pythons import other_pythons
from jax_hetccl.syncing import formats

# Devices of each process of each cluster -> what runs there; with --soak everything runs everywhere.
CELLS: dict[str, tuple[str, ...]] = {
    "8/3": ("formats", "bytes_on_the_wire", "diloco", "fewer_bytes"),
    "1+1/2/1": (
        "formats",
        "not_finite",
        "bytes_on_the_wire",
        "diloco",
        "diloco_narrow",
        "lost_is_sent_later",
        "fewer_bytes",
    ),
    "2/1": (
        "formats",
        "errors_are_sent_later",
        "narrow_leaves",
        "absent",
        "chain",
        "explicit_axes",
        "refusals",
        "averaging",
        "diloco",
        "lost_is_sent_later",
    ),
}
ONE_PROCESS = ("absent", "chain", "refusals")  # these look at whole arrays, which a process of several does not hold
MIXED = ("formats", "diloco_narrow", "averaging")

_run = functools.partial(run, worker="optax_worker.py")


TABLE = Table(CELLS, ONE_PROCESS)
pytest_generate_tests = TABLE.parametrize


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_a_reciprocal_is_rounded_to_nearest_however_the_platform_divides(off: int) -> None:
    mantissas = np.concatenate([np.arange(1 << 23, 1 << 24, 9973), [(1 << 23) + 1, (1 << 24) - 1, 1 << 23]]).astype(
        np.int32
    )
    wanted = np.rint(2.0**47 / mantissas).astype(np.int32)
    assert (np.asarray(formats.nearest(wanted + np.int32(off), mantissas)) == wanted).all()


def test_reciprocals_of_floats() -> None:
    x = np.float32([1, 3, 7, 0.1, 7.25, -3, 2**-100, 1e30, 12345678, np.inf])
    wanted = (1 / x.astype(np.float64)).astype(np.float32)
    assert (np.asarray(jax.jit(jax.vmap(formats.reciprocal))(x)) == wanted).all()
    assert np.isinf(formats.reciprocal(np.float32(0))) and np.isnan(formats.reciprocal(np.float32(np.nan)))


def test_optax(layout: str, scenario: str, soak: bool) -> None:
    # One of them compiles as users do: what a compiler fuses must not change a bit.
    judge(_run(layout, TABLE.scenarios(layout, soak), quick=layout != "2/1"), scenario)


def test_different_things_are_an_error_in_all() -> None:
    judge(_run("2/1", ("differing",)), "differing")


@pytest.mark.skipif(not other_pythons(), reason="HETCCL_TEST_PYTHONS names no two interpreters")
@pytest.mark.parametrize("scenario", MIXED)
def test_optax_of_two_jax_versions(scenario: str) -> None:
    judge(_run("2/1", MIXED, other_pythons()), scenario)
