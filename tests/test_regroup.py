"""A smaller world out of a failed one, and a larger one again: the control planes, with the real sockets, without JAX."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import Meeting, config

from jax_hetccl import _reform
from jax_hetccl._errors import AgreementError, HetcclError, PeerLostError, RendezvousError
from jax_hetccl._reform import complete
from jax_hetccl.rendezvous import addresses, coordinator, survivors
from jax_hetccl.rendezvous import regroup as regroup_lib
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.join import join
from jax_hetccl.rendezvous.member import Member, members_of, narrowed
from jax_hetccl.rendezvous.regroup import AHEAD, regroup
from jax_hetccl.rendezvous.survivors import Word

CLUSTERS = "a:1,b:2,c:1"
ALL = ("a/0", "b/0", "b/1", "c/0")


def die(control: ControlPlane) -> None:
    """What a kill leaves of a member: connections end without a goodbye, and a coordinator with them."""
    if control._joined.hosted:
        control._joined.hosted.stop()
        control._joined.hosted = None
    control._stop = control._replaced = True
    os.eventfd_write(control._wake, 1)
    control._thread.join(5)


class World:
    """Members of a world as threads of one process, some of which die and regroup."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.old = dict(meeting.members)
        self.new: list[ControlPlane] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(16)

    def job(self, name: str, **settings: Any) -> Any:
        return config(name, self.meeting.port, **{**self.meeting.settings, **settings})

    def regroup(self, name: str, **options: Any) -> concurrent.futures.Future[ControlPlane]:
        return self._pool.submit(regroup, self.old[name], self.job(name), {"who": name}, **{"timeout": 15.0, **options})

    def together(self, *names: str, **options: Any) -> list[ControlPlane]:
        return self.results([self.regroup(name, **options) for name in names])

    def results(self, futures: Sequence[concurrent.futures.Future[ControlPlane]]) -> list[ControlPlane]:
        made = [future.result(40) for future in futures]
        self.new += made
        return made

    def retire(self, names: Sequence[str], made: Sequence[ControlPlane]) -> None:
        """What `_world.reform` does once the new world is known."""
        for name, control in zip(names, made, strict=True):
            control.inherit(self.old[name])
        list(self._pool.map(lambda name: self.old[name].close(), names))

    def start(self, run: Callable[[], ControlPlane]) -> concurrent.futures.Future[ControlPlane]:
        return self._pool.submit(run)

    def close(self) -> None:
        list(self._pool.map(lambda control: control.close(), self.new))
        self._pool.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[..., World]]:
    made: list[tuple[Meeting, World]] = []

    def go(clusters: str = CLUSTERS, *names: str) -> World:
        meeting = Meeting(clusters=clusters)
        meeting.join(*(names or ALL))
        made.append((meeting, World(meeting)))
        return made[-1][1]

    yield go
    for meeting, world in made:
        world.close()
        meeting.__exit__()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hetccl")]


def names_of(control: ControlPlane) -> list[str]:
    return [member.name for member in control.members]


def test_the_survivors_form_a_world_with_keys_of_its_own(start: Any) -> None:
    world = start()
    before = world.old["a/0"]
    key = before.pair_key(1)
    die(world.old["c/0"])
    made = world.together("a/0", "b/0", "b/1")
    assert len({control.epoch for control in made} | {before.epoch}) == 2
    assert all(names_of(control) == ["a/0", "b/0", "b/1"] for control in made)
    assert [member.record["who"] for member in made[1].members] == ["a/0", "b/0", "b/1"]
    assert made[0].pair_key(1) == made[1].pair_key(0) != key
    made[2].publish("step", 7)
    assert made[0].collect("step", [2], 5) == {2: 7}
    assert all(control.state_of(m) == "present" for control in made for m in range(3))


def test_the_coordinators_machine_is_not_needed_and_its_cluster_comes_back(start: Any) -> None:
    world = start()
    die(world.old["a/0"])
    left = ("b/0", "b/1", "c/0")
    made = world.together(*left)
    assert narrowed(world.job("b/0"), made[0].members).clusters == (("b", 2), ("c", 1))
    assert not made[0].seekers()
    world.retire(left, made)
    assert made[0].host(coordinator.host(world.job("b/0"))), "the first of those left takes the coordinator over"
    back = world.start(lambda: join(world.job("a/0")))
    deadline = time.monotonic() + 15
    while any(control.seekers() != ["a/0"] for control in made) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not back.done()
    larger = [
        world.start(lambda n=n, c=c: join(world.job(n), {}, c, ["a", "b", "c"]))
        for n, c in zip(left, made, strict=True)
    ]
    grown = world.results([back, *larger])
    assert all(names_of(control) == list(ALL) for control in grown)
    assert len({control.epoch for control in grown} | {control.epoch for control in made}) == 2
    assert [new.inherit(old) for old, new in zip(made, grown[1:], strict=True)] == [True, False, False]
    for old in made:
        old.close()
    grown[0].publish("step", 1)
    assert grown[3].collect("step", [0], 5) == {0: 1}


def test_a_death_while_they_agree(start: Any) -> None:
    world = start("a:1,b:1,c:1,d:1", "a/0", "b/0", "c/0", "d/0")
    die(world.old["d/0"])
    waiting = [world.regroup("a/0"), world.regroup("b/0")]
    time.sleep(0.3)
    assert not any(future.done() for future in waiting), "c has not come yet"
    die(world.old["c/0"])
    assert [names_of(control) for control in world.results(waiting)] == [["a/0", "b/0"]] * 2


@pytest.mark.parametrize("when", ["at once", "when connected"])
def test_a_death_of_the_one_that_decides(start: Any, when: str) -> None:
    """Its decision is out already; the others see that it is gone and agree anew."""
    world = start()
    die(world.old["c/0"])

    class Dies(regroup_lib._Regroup):
        def _stands(self, control: ControlPlane, decision: Any) -> bool:
            if when == "when connected":
                control.publish("join/hello", None)
                time.sleep(0.3)
            die(control)
            die(self._old)
            control.close()
            raise HetcclError("dead")

    first = world.start(Dies(world.old["a/0"], world.job("a/0"), {"who": "a/0"}, None, 1, 15.0).run)
    waiting = [world.regroup("b/0"), world.regroup("b/1")]
    with pytest.raises(HetcclError, match="dead"):
        first.result(20)
    made = world.results(waiting)
    if when == "at once":
        assert [names_of(control) for control in made] == [["b/0", "b/1"]] * 2
    else:  # b/0 and b/1 had heard from everybody: the world stood, and has lost a/0 since
        assert len({control.epoch for control in made}) == 1
        assert {tuple(names_of(control)) for control in made} <= {("a/0", "b/0", "b/1"), ("b/0", "b/1")}


def test_a_silent_cluster_is_dropped_in_time_and_learns_of_it(start: Any) -> None:
    """As after SIGSTOP: connected, but it does not call."""
    world = start()
    began = time.monotonic()
    made = world.together("a/0", "b/0", "b/1", timeout=1.0)
    assert 1.0 <= time.monotonic() - began < 4
    assert all(names_of(control) == ["a/0", "b/0", "b/1"] for control in made)
    world.retire(("a/0", "b/0", "b/1"), made)
    with pytest.raises(RendezvousError, match="a/0, b/0, b/1 go on without this cluster.*hetccl.initialize"):
        world.regroup("c/0").result(10)


def test_named_clusters(start: Any) -> None:
    world = start()
    made = world.together("a/0", "c/0", clusters=["a", "c"])
    assert all(names_of(control) == ["a/0", "c/0"] for control in made)
    for name in ("b/0", "b/1"):
        with pytest.raises((RendezvousError, AgreementError), match=r"go on without this cluster|clusters='a,c'"):
            world.regroup(name).result(10)


def test_different_clusters_are_an_error_that_shows_both(start: Any) -> None:
    world = start()
    futures = {"a/0": world.regroup("a/0", clusters=["a", "b"])}
    time.sleep(0.2)
    futures |= {name: world.regroup(name) for name in ALL[1:]}
    concurrent.futures.wait(futures.values(), 2)
    raised = {name: str(future.exception()) for name, future in futures.items() if future.done()}
    both = "a/0 says clusters='a,b', but b/"
    assert both in raised["a/0"] and any(both in raised.get(name, "") for name in ("b/0", "b/1")), raised
    # Nothing is lost: the call may be repeated. Who came when the others had given up already waits for that.
    again = [world.regroup(name) if name in raised else future for name, future in futures.items()]
    assert [names_of(control) for control in world.results(again)] == [list(ALL)] * 4


def test_a_named_cluster_that_does_not_come_is_named(start: Any) -> None:
    world = start()
    futures = [world.regroup(n, clusters=["a", "b"], timeout=1.0) for n in ("a/0", "b/0")]
    for future in futures:
        with pytest.raises(RendezvousError, match=r"waited 1 s for b/1 to call it too"):
            future.result(10)
    die(world.old["c/0"])
    with pytest.raises(PeerLostError, match="c/0 is gone; leave it out"):
        world.regroup("a/0", clusters=["a", "c"]).result(10)


def test_too_few_and_a_broken_cluster(start: Any) -> None:
    world = start()
    die(world.old["b/1"])
    few = [world.regroup(n, at_least=3) for n in ("a/0", "c/0")]
    with pytest.raises(PeerLostError, match=r"b/0 cannot go on: its cluster lost b/1"):
        world.regroup("b/0").result(10)
    for future in few:
        with pytest.raises(RendezvousError, match="only a, c can go on, fewer clusters than at_least=3"):
            future.result(20)
    # That one gave up may still be on its way to the other, which would take it for an answer to its next attempt.
    world.old["a/0"].collect("regroup/end", [3], 5)
    world.old["c/0"].collect("regroup/end", [0], 5)
    assert [names_of(control) for control in world.together("a/0", "c/0", at_least=2)] == [["a/0", "c/0"]] * 2


def test_a_cluster_of_which_one_process_does_not_come_is_left(start: Any) -> None:
    world = start()
    die(world.old["c/0"])
    going = world.regroup("a/0", timeout=2.0)
    with pytest.raises(PeerLostError, match="b/0 cannot go on: its cluster hears nothing of b/1"):
        world.regroup("b/0", timeout=1.0).result(10)
    assert names_of(world.results([going])[0]) == ["a/0"]


def test_who_has_gone_on_says_so_to_who_has_not(start: Any) -> None:
    """One that did not hear all of the new world must not take those who did for gone, and form another one."""
    world = start()
    die(world.old["c/0"])
    world.old["a/0"].publish(AHEAD, ["a/0", "b/0", "b/1"])
    world.old["b/0"].collect(AHEAD, [0], 5)
    world.old["a/0"].close()
    with pytest.raises(RendezvousError, match="b/0: a/0 go on without this cluster"):
        world.regroup("b/0").result(10)


def test_the_coordinators_name_may_be_gone_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    known = addresses.resolve_host("localhost", 7000)

    def gone(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", gone)
    assert addresses.resolve_host("localhost", 7000) == known
    with pytest.raises(RendezvousError, match="'never.known' cannot be resolved"):
        addresses.resolve_host("never.known", 7000)


def test_a_cluster_that_does_not_come_back_leaves_the_world_as_it_is(start: Any) -> None:
    world = start()
    die(world.old["c/0"])
    left = ("a/0", "b/0", "b/1")
    made = world.together(*left)
    world.retire(left, made)
    futures = [
        world.start(lambda n=n, c=c: join(world.job(n, join_timeout=1.5), {}, c, ["a", "b", "c"]))
        for n, c in zip(left, made, strict=True)
    ]
    for future in futures:
        with pytest.raises(RendezvousError, match=r"waited 2 s.*missing: c/0"):
            future.result(10)
    made[0].publish("step", 3)
    assert made[2].collect("step", [0], 5) == {0: 3}
    time.sleep(1.2)  # a sign of life takes the seat again
    with pytest.raises(RendezvousError, match="b/1 is held by"):
        join(world.job("b/1"))


def test_some_of_those_lost_come_back(start: Any) -> None:
    """A job of four that lost two takes back the one that is there, and the other one waits on."""
    world = start("a:1,b:1,c:1,d:1", "a/0", "b/0", "c/0", "d/0")
    die(world.old["c/0"])
    die(world.old["d/0"])
    made = world.together("a/0", "b/0")
    world.retire(("a/0", "b/0"), made)
    early = world.start(lambda: join(world.job("d/0", join_timeout=6)))
    back = world.start(lambda: join(world.job("c/0")))
    futures = [
        world.start(lambda n=n, c=c: join(world.job(n), {}, c, ["a", "b", "c"]))
        for n, c in zip(("a/0", "b/0"), made, strict=True)
    ]
    grown = world.results([*futures, back])
    assert [names_of(control) for control in grown] == [["a/0", "b/0", "c/0"]] * 3
    with pytest.raises(RendezvousError, match="a/0 .*is in a world that is still running"):
        early.result(20)
    for old, new in zip(made, grown, strict=False):
        new.inherit(old)
        old.close()


def test_a_failure_that_is_still_being_agreed_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reform, "_FAILURE_S", 0.3)

    class World:
        failure: HetcclError | None = None

    world: Any = World()
    with pytest.raises(HetcclError, match="is well, so there is no loss to go on from"):
        _reform._await_failure(world)
    threading.Timer(0.1, lambda: setattr(world, "failure", PeerLostError("gone"))).start()
    _reform._await_failure(world)


# --- pure decisions ------------------------------------------------------------------------------

MEMBERS = members_of(config("a/0", 1, clusters="a:2,b:1,c:2,d:1"), [[f"{c}/{p}", {}] for c in "abcd" for p in (0, 1)])
_gone = st.frozensets(st.integers(0, 3))
_words = st.dictionaries(st.integers(0, len(MEMBERS) - 1), _gone.map(lambda gone: Word(gone)))


@given(_gone, _words)
def test_what_is_gone_only_grows_and_comes_to_an_end(gone: frozenset[int], words: dict[int, Word]) -> None:
    found = survivors.merged(gone, words, MEMBERS)
    assert gone <= found
    assert survivors.merged(found, words, MEMBERS) == found
    for index, word in words.items():
        assert word.gone <= found or MEMBERS[index].cluster in found, "a living process was not listened to"


@given(_words, _words)
def test_living_processes_come_to_say_the_same(first: dict[int, Word], more: dict[int, Word]) -> None:
    """Each starts with its own word and hears the others' in rounds."""
    words = {m.index: Word(first.get(m.index, Word(frozenset())).gone) for m in MEMBERS}
    for _ in range(len(MEMBERS)):
        words = {i: Word(survivors.merged(w.gone, words, MEMBERS)) for i, w in words.items()}
    for member in MEMBERS:
        mine = words[member.index].gone
        if member.cluster not in mine:
            for other in survivors.living(mine, MEMBERS):
                theirs = words[other.index].gone
                assert theirs == mine or member.cluster in theirs


def test_of_two_that_accuse_each_other_the_lower_one_is_believed() -> None:
    words = {0: Word(frozenset({1})), 2: Word(frozenset({0}))}
    assert survivors.merged((), words, MEMBERS) == {1}


def test_words_travel() -> None:
    word = Word(frozenset({2, 0}), ("a", "b"), {"curve": b"x"}, 3)
    assert Word.unpacked(word.packed()) == word


def test_members_of_some_clusters() -> None:
    job = config("c/1", 1, clusters="a:2,b:1,c:2", axes={"data": 5, "model": None})
    some = members_of(job, [["c/1", {}], ["a/1", {}], ["a/0", {}], ["c/0", {}]])
    assert [(m.index, m.cluster, m.name) for m in some] == [(0, 0, "a/0"), (1, 0, "a/1"), (2, 1, "c/0"), (3, 1, "c/1")]
    smaller = narrowed(job, some)
    assert smaller.clusters == (("a", 2), ("c", 2)) and smaller.member_name == "c/1"
    assert smaller.axes == {"data": None, "model": None}
    every = [Member(i, 0, n.partition("/")[0], 0, {}) for i, n in enumerate(("a/0", "a/1", "b/0", "c/0", "c/1"))]
    assert narrowed(job, every) is job


def test_clusters_wait_as_a_whole_and_for_everybody() -> None:
    job = [("a", 1), ("b", 2), ("c", 1)]
    assert complete(job, ["a"], [["b/0", "b/1", "c/0"], ["b/1", "c/0"]]) == ("c",)
    assert complete(job, ["a"], [[], ["b/0", "b/1"]]) == ()
