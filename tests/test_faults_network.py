"""Links that lose, delay, reorder, limit, flap, and go down without a word, between namespaces of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import network, streams
from harness.layout import Layout
from harness.network import Network
from harness.pool import Pool, World

LOST_S = 5.0  # from the moment at which a link goes down to the last error
FLAP_S = 3.0


@pytest.fixture(params=network.KINDS)
def spread(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Network, World]]]:
    """A world with each cluster on a host of its own."""
    if why := network.lacking(request.param):
        pytest.skip(why)
    pool.retire()
    made: list[tuple[Network, World]] = []

    def start(layout: str, **options: Any) -> tuple[Network, World]:
        parsed = Layout.parse(layout)
        hosts = Network(len(parsed.clusters), request.param)
        coordinator = {"HETCCL_COORDINATOR": f"{hosts.address(0)}:7700"}
        around = {f"{parsed.name(c)}/0": {"network": hosts.namespaces[c]} for c in range(len(parsed.clusters))}
        try:
            world = World(
                parsed, "tcp", surroundings=around, environment=coordinator, timeout=30.0,
                arrival_timeout=30.0, **options,
            )  # fmt: skip
        except BaseException:
            hosts.close()
            raise
        made.append((hosts, world))
        return made[-1]

    yield start
    for hosts, world in made:
        world.kill()
        hosts.close()


def _ask(world: World, call: str, *arguments: dict[str, Any]) -> None:
    for (_, worker), own in zip(world.workers, arguments, strict=True):
        worker.ask(op="call", call=f"fault_programs:{call}", arguments=own)


@pytest.mark.parametrize("layout", ["1/1", "1/2/1"])
def test_a_link_that_goes_down_without_a_word(spread: Any, layout: str) -> None:
    """No packet says so: heartbeats stay unacknowledged. Everybody raises, on both sides of the cut."""
    hosts, world = spread(layout)
    streams.begin(world, pause=0.01)
    alone = len(world.workers) - 1
    down = time.monotonic()
    hosts.become(cut=(alone,))
    for at, (_, worker) in enumerate(world.workers):
        reply = worker.answer(20)
        assert not reply["wrong"] and reply["steps"] > 0, reply
        assert reply["kind"] == "PeerLostError", reply
        lost = ["left", "right"][: len(world.workers) - 1] if at == alone else [world.workers[alone][1].label]
        assert any(name in reply["check"] for name in lost), reply["check"]
        assert "during" in reply["check"], reply["check"]
        assert reply["at"] - down < LOST_S, f"{worker.label}: {reply['at'] - down:.2f} s, {reply['check']}"
        print(f"{worker.label}: {reply['at'] - down:.2f} s: {reply['check']}")


def test_a_link_that_is_gone_before_the_first_channel(spread: Any) -> None:
    """Dialing into nothing ends as soon as the control plane knows."""
    hosts, world = spread("1/1", axes={"data": 2})
    down = time.monotonic()
    hosts.become(cut=(1,))
    _ask(world, "stream", {}, {})
    for _, worker in world.workers:
        reply = worker.answer(20)
        assert reply["kind"] == "PeerLostError", reply
        assert reply["at"] - down < LOST_S + 1, reply  # the first trace and its agreement come before


def test_a_link_that_flaps(spread: Any) -> None:
    """Three seconds without a packet, once while both exchange and once while nobody does, are no error."""
    hosts, world = spread("1/1")
    streams.begin(world, steps=80, pause=0.02)
    for down in (0.4, 0.2, FLAP_S):
        hosts.become(cut=(1,))
        time.sleep(down)
        hosts.become()
        time.sleep(0.3)
    for _, worker in world.workers:
        reply = worker.answer(60)
        assert reply["steps"] == 80 and not reply["wrong"] and not reply["text"], reply
    hosts.become(cut=(1,))
    time.sleep(FLAP_S)
    hosts.become()
    time.sleep(2.5)  # in which an idle connection would end, if it did
    _ask(world, "stream", *[{"steps": 3}] * 2)
    for _, worker in world.workers:
        reply = worker.answer(60)
        assert reply["steps"] == 3 and not reply["wrong"] and not reply["text"], reply


CONDITIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    # conditions, bytes of a round, rounds
    "100 Mbit/s": ({"rate_mbit": 100}, 6 << 20, 2),
    "50 ms": ({"rate_mbit": 100, "delay_ms": 50, "queue_ms": 400}, 10 << 20, 2),
    "1 % loss": ({"rate_mbit": 100, "delay_ms": 1, "lose_every": 100}, 3 << 20, 4),
    "reordering": ({"rate_mbit": 100, "delay_ms": 2, "reorder_every": 20}, 6 << 20, 2),
}
# Both streams and the network itself need this machine's cores, which others use too.
ATTEMPTS = 4


def test_goodput_on_bad_links(spread: Any, soak: bool) -> None:
    """Right results, and nine tenths of what a plain TCP stream gets there."""
    hosts, world = spread("1/1")
    poor = []
    for number, (what, (conditions, nbytes, rounds)) in enumerate(CONDITIONS.items()):
        found = [""]
        for attempt in range(ATTEMPTS):
            before = hosts.become(**conditions)
            port = 7800 + ATTEMPTS * number + attempt
            common = {
                "address": hosts.address(0),
                "port": port,
                "nbytes": nbytes,
                "rounds": rounds * (5 if soak else 1),
            }
            _ask(world, "goodput", {**common, "first": True}, {**common, "first": False})
            replies = [worker.answer(200) for _, worker in world.workers]
            assert all(not r.get("wrong", [r]) for r in replies), replies
            ours, plain = (min(map(max, zip(*(r[who] for r in replies), strict=True))) for who in ("ours", "plain"))
            lost = hosts.become()["lost"] - before["lost"]
            assert (lost > 0) == ("loss" in what), f"{what}: {lost} packets lost"
            megabits = replies[0]["bytes"] * 8 / 1e6
            found.append(f"{what}: {megabits / ours:.1f} Mbit/s, plain TCP {megabits / plain:.1f}, {lost} packets lost")
            if plain / ours >= 0.9:
                break
        else:
            poor += found
        print("\n".join(found))
    assert not poor, "\n".join(poor)
