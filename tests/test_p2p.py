"""send and recv between clusters whose programs differ."""

from __future__ import annotations

import signal
import time

import pytest

from harness.asserted import run_asserted
from harness.case import CASES, Case
from harness.ends import all_failed
from harness.layout import Layout
from harness.pool import Pool, Run, World

WORLDS = [(layout, transport) for layout in ("1/1", "2/2", "2/1") for transport in ("shm", "tcp")]


def _cells() -> list[tuple[str, str, Case, bool]]:
    """Everything on uneven clusters over shared memory; elsewhere one mode of each case and fewer types."""
    found = []
    for layout, transport in WORLDS:
        whole = (layout, transport) == ("2/1", "shm")
        for number, case in enumerate(CASES.values()):
            takes = "p2p" in case.tags or ("p2p-even" in case.tags and layout != "2/1")
            if takes and (whole or case.params.get("dtype", "bfloat16") == "bfloat16"):
                modes = case.vma if whole else (case.vma[number % len(case.vma)],)
                found += [(layout, transport, case, vma) for vma in modes]
    return found


@pytest.mark.parametrize(
    ("layout", "transport", "case", "vma"), _cells(), ids=lambda v: v.name if isinstance(v, Case) else str(v)
)
def test_p2p(pool: Pool, layout: str, transport: str, case: Case, vma: bool) -> None:
    run_asserted(pool, layout, transport, case, vma)


@pytest.mark.parametrize(("layout", "transport"), [("1+1/2", "shm"), ("1+1/1", "tcp")])
def test_clusters_of_several_processes(pool: Pool, layout: str, transport: str) -> None:
    run_asserted(pool, layout, transport, CASES["p2p.processes"], vma=False)


@pytest.mark.parametrize(("transport", "what"), [("shm", "size"), ("tcp", "size"), ("tcp", "dtype")])
def test_mismatch_shows_both_sides(pool: Pool, transport: str, what: str) -> None:
    pool.retire()
    with World(Layout.parse("1/1"), transport) as world:
        run = Run(CASES[f"p2p.mismatch[{what}]"], vma=False)
        world.ask([run, run], each_device=True)
        replies = world.answers(20)
        # The sender of a small message may be done before the receiver finds out; it learns with its next program.
        received = [r for r in replies if r.label.startswith("right")]
        other = r"float32\[4\]" if what == "size" else r"int32\[8\]"
        all_failed(received, "MismatchError", "left", r"send/p2p\.act float32\[8\]", rf"recv/p2p\.act {other}")
        time.sleep(0.5)
        world.ask([Run(CASES["p2p.nothing"], vma=False)] * 2)
        assert all(r.health and "float32[8]" in r.health["message"] for r in world.answers(10))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_that_dies(pool: Pool, transport: str) -> None:
    """The check at the end of the program covers a program of one device without any collective."""
    pool.retire()
    with World(Layout.parse("1/1"), transport, arrival_timeout=60.0) as world:
        world.ask([None, Run(CASES["p2p.waits"], vma=False)], each_device=True)
        time.sleep(2)
        started = time.monotonic()
        world.worker("left/0").signal(signal.SIGKILL)
        replies = world.answers(10)
        assert time.monotonic() - started < 6
        all_failed(replies, "PeerLostError", "left")


def test_a_peer_that_never_sends(pool: Pool) -> None:
    pool.retire()
    with World(Layout.parse("1/1"), "shm", arrival_timeout=3.0) as world:
        world.ask([None, Run(CASES["p2p.waits"], vma=False)], each_device=True)
        all_failed(world.answers(12), "ExchangeTimeoutError", "left", "recv/p2p")
