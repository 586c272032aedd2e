"""Computation between starts and dones where the compiler would not leave it there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import blocks, item

from jax_hetccl.ordering.overlap import ties
from jax_hetccl.ordering.schedule import Done, Kind, Run, Start, schedule

BIG = dict(bucket_bytes=4, inflight_bytes=1 << 30)


def test_independent_computation_stands_between_start_and_done():
    # 0 makes what 1 exchanges; 2 -> 3 -> 4 is a chain of products beside it, 5 uses both.
    items = [item(Kind.PLAIN), item(Kind.EXCHANGE, 0), item(Kind.PLAIN), item(Kind.PLAIN, 2), item(Kind.PLAIN, 3)]
    items.append(item(Kind.PLAIN, 1, 4))
    steps = schedule(items, **BIG)
    assert steps == [Run(0), Start((1,)), Run(2), Run(3), Run(4), Done((1,)), Run(5)]
    assert ties(items, steps, {2, 3, 4}) == ties(items, steps, {2, 4})  # the ends of the chain are enough
    assert ties(items, steps, {2, 3, 4}).behind_start == {2}
    assert ties(items, steps, {2, 3, 4}).before_done == {(1,): (4,)}


def ancestors(items, of):
    """The operations given and all that they need, directly or not."""
    found, todo = set(), list(of)
    while todo:
        if (i := todo.pop()) not in found:
            found.add(i)
            todo.extend(items[i].needs)
    return found


class Counted(list):
    """Counts how often items are looked at."""

    looks = 0

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


def test_time_grows_with_the_program_and_not_with_its_square():
    def looks(layers):
        """A long chain of products; each layer's result is exchanged and used further on, beside heavy work of its own."""
        items = []
        for layer in range(layers):
            at = len(items)
            items.append(item(Kind.PLAIN, *([at - 4] if layer else [])))
            items.append(item(Kind.EXCHANGE, at))
            items.append(item(Kind.PLAIN, at))
            items.append(item(Kind.PLAIN, at + 1, at + 2, *([at - 1] if layer else [])))
        counted = Counted(items)
        ties(counted, schedule(items, **BIG), {i for i, x in enumerate(items) if x.kind is Kind.PLAIN})
        return counted.looks

    assert looks(400) < 3 * looks(200)


def test_a_backward_pass_is_left_alone():
    """Every product is waited for by a later start; those keep the order without help."""
    items = [
        item(Kind.PLAIN),  # 0: backward of layer 2
        item(Kind.EXCHANGE, 0),
        item(Kind.PLAIN, 0),  # 2: backward of layer 1
        item(Kind.EXCHANGE, 2),
        item(Kind.PLAIN, 1, 3),  # the update
    ]
    found = ties(items, schedule(items, **BIG), {0, 2})
    assert not found.behind_start and found.before_done == {(1,): ()}


@given(blocks(), st.data())
def test_ties_keep_heavy_operations_between_start_and_done(items, data):
    """Whatever a compiler does within data dependences, the chain and the ties: no heavy operation of a round that is
    not waited for by a start can come before the last start in front of it, or after the round's first done."""
    heavy = data.draw(st.sets(st.sampled_from(range(len(items))))) if items else set()
    heavy = {i for i in heavy if items[i].kind in (Kind.PLAIN, Kind.LIGHT)}
    steps = schedule(items, bucket_bytes=8, inflight_bytes=30)
    found = ties(items, steps, heavy)
    for at, step in enumerate(steps):
        if not isinstance(step, Done) or isinstance(steps[at - 1], Done):
            continue
        first = max((i for i in range(at) if isinstance(steps[i], Done)), default=-1)
        window = steps[first + 1 : at]
        begin = next(i for i, s in enumerate(window) if isinstance(s, Start))
        last = max(i for i, s in enumerate(window) if isinstance(s, Start))
        waited = ancestors(items, [n for s in window if isinstance(s, Start) for e in s.bucket for n in items[e].needs])
        loose = [s.item for s in window[begin:] if isinstance(s, Run) and s.item in heavy and s.item not in waited]
        for i in loose:
            assert any(j in found.behind_start for j in ancestors(items, [i]) & set(loose))
            assert any(i in ancestors(items, [j]) for j in found.before_done[step.bucket])
        after = {s.item for s in window[last:] if isinstance(s, Run)} & heavy
        assert after <= set(loose)


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
import test_order_between_clusters as twins
from jax_hetccl import _compat, spanning
from jax_hetccl.ordering import module

twins.SIZES = (1, 1)

class Hooks(spanning.SpanningHooks):
    def finish_module(self, program):
        module.finish(self.world, self.registry, program)
        if "hetccl_exchange_start" in str(program):
            print(program)

_compat.install(Hooks(twins.TwinWorld(0, (sys.argv[1], sys.argv[1]))))
mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",), axis_types=(AxisType.Auto,))

def products(x, a):
    y = lax.psum(x * 2, "data")
    b = jnp.tanh((a @ a) @ a)
    return y, b

def stacked(x, a):
    # What is sent is a slice, and what is received goes into a slice.
    return lax.scan(lambda c, row: (c, lax.ppermute(row, "data", [(0, 1), (1, 0)])), 0.0, x.reshape(4, -1))[1], a

def slices(x, a):
    return lax.ppermute(x[: x.size // 2], "data", [(0, 1), (1, 0)]), a

def predicates(x, a):
    def run(start):
        return lax.while_loop(lambda c: lax.pmax(x[0], "data") + c < 5, lambda c: c + 1, start)
    return run(0.0), run(9.0)

program = {f.__name__: f for f in (products, stacked, slices, predicates)}[sys.argv[2]]
mapped = jax.shard_map(program, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P(), P()), check_vma=False)
shapes = jax.ShapeDtypeStruct((1 << 21,), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
jax.jit(mapped).trace(*shapes).lower(lowering_platforms=(sys.argv[1],))
"""


def lowered(platform: str, program: str) -> str:
    """The text of a program as a cluster of this platform gets it."""
    package = Path(importlib.util.find_spec("jax_hetccl").origin).parent.parent
    path = os.pathsep.join([str(package), str(Path(__file__).parent)])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, platform, program]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
def test_a_program_for_gpus_ties_its_products(platform):
    text = lowered(platform, "products")
    words = {"hetccl_exchange_start": "S", "hetccl_exchange_done": "D", "dot_general": "g", "optimization_barrier": "|"}
    order = "".join(next((w for name, w in words.items() if name in line), "") for line in text.splitlines())
    assert order == ("S|gg|D|" if platform != "cpu" else "SggD"), text


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_gpus_compiler_cannot_fuse_slices_with_exchanges(platform):
    """What is received meets the scan's dynamic_update_slice only behind a barrier; what is sent is aliased, or behind
    one."""
    lines = lowered(platform, "stacked").splitlines()
    apart = {line.split()[0] for line in lines if "optimization_barrier" in line}
    ((start, sent),) = re.findall(r"(\S+):4 = .*@hetccl_exchange_start\(%[^,]+, (%[^)]+)\)", "\n".join(lines))
    ((done, operands),) = re.findall(r"(\S+):2 = .*@hetccl_exchange_done\((.*?)\)", "\n".join(lines))
    assert operands == ", ".join(f"{start}#{i}" for i in range(4)) and sent not in apart
    users = [line for line in lines if re.search(rf"{done}#1\b", line)]
    assert len(users) == 1 and ("optimization_barrier" in users[0]) == (platform != "cpu"), users


def test_what_is_sent_as_it_is_stands_behind_a_barrier():
    """A slice of an argument is sent itself, unaliased."""
    text = lowered("cuda", "slices")
    ((sent, ends),) = re.findall(
        r"@hetccl_exchange_start\(%[^,]+, (%[^)]+)\).*?@hetccl_exchange_done\((.*?)\)", text, re.S
    )
    assert f"{sent} = stablehlo.optimization_barrier" in text and ends.endswith(sent)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_what_follows_a_loop_waits_for_its_predicate(platform):
    """The predicate's chain cannot leave it; the body's must not look unchanged, or loops may change places."""
    text = lowered(platform, "predicates")
    bodies = re.findall(r"\} do \{\n(.*?)stablehlo.return (.*?) :", text, re.S)
    assert len(bodies) == 2
    for body, returned in bodies:
        assert re.search(rf"{returned.split(', ')[-1]} = stablehlo.custom_call @hetccl_status", body), text
