"""Which ports RDMA uses: NCCL's syntax, GIDs, distances, and the nearest port of every rank. Plain functions."""

from __future__ import annotations

import collections
import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl.rdma import choose, discover, hca, ports
from jax_hetccl.rdma.choose import Link, NoLink, Seat
from jax_hetccl.rdma.places import Distance, Place, distance, path_of
from jax_hetccl.rdma.ports import Gid, Port

V4 = Gid(1, "::ffff:10.0.0.1", "RoCE v2", "eth0")


def port(device: str = "mlx5_0", number: int = 1, **facts) -> Port:
    usual = dict(state="ACTIVE", link_layer="Ethernet", transport="InfiniBand", mtu=4096, speed=100.0, lid=0, gid=V4)
    return Port(device, number, **{**usual, **facts})


def seat(*places: tuple[Port, Distance], host: str = "host", owner: str = "left/0", missing: str = "") -> Seat:
    return Seat(host, owner, tuple(p for p, _ in places), tuple(d for _, d in places), missing)


# --- HETCCL_IB_HCA -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device", "number", "allowed"),
    [
        ("mlx5", "mlx5_0", 1, True),
        ("mlx5_1", "mlx5_10", 2, True),  # a prefix, as NCCL warns
        ("=mlx5_1", "mlx5_10", 2, False),
        ("=mlx5_0:1,mlx5_1:1", "mlx5_1", 1, True),
        ("=mlx5_0:1,mlx5_1:1", "mlx5_1", 2, False),
        ("=mlx5_0:1,mlx5_1", "mlx5_1", 2, True),
        ("^mlx5_3,mlx5_4", "mlx5_4", 1, False),
        ("^mlx5_3,mlx5_4", "mlx5_0", 1, True),
        ("^=mlx5_1", "mlx5_10", 1, True),
        ("^=mlx5_1", "mlx5_1", 1, False),
        ("^mlx5_1:2", "mlx5_1", 1, True),
        ("mlx5_0:1,^mlx5_3", "mlx5_0", 1, True),
        ("mlx5_0:1,^mlx5_3", "mlx5_3", 1, False),
        ("mlx5_0:1,^mlx5_3", "mlx5_1", 1, False),
        ("mlx5,^=mlx5_3", "mlx5_1", 1, True),
        ("mlx5,^=mlx5_3", "mlx5_3", 1, False),
        ("rxe0", "siw0", 1, False),
    ],
)
def test_selection_follows_nccl(text, device, number, allowed):
    selection = hca.parse(text)
    assert selection.allows(device, number) == allowed and str(selection) == text


@pytest.mark.parametrize("text", ["", "mlx5_0:x", "mlx5_0:0", "mlx5 0", ",", "=", "mlx5_0:1:2"])
def test_what_is_no_selection_says_so(text):
    with pytest.raises(ValueError, match="expected a list such as|counted from 1"):
        hca.parse(text)


names = st.from_regex(r"\A(mlx5|rxe|bnxt_re)_?[0-9]{1,2}\Z")


@given(st.lists(names, min_size=1, max_size=4), st.booleans(), names, st.integers(1, 2))
def test_an_exclude_list_allows_what_the_same_list_does_not(listed, exact, device, number):
    text = ("=" if exact else "") + ",".join(listed)
    assert hca.parse(text).allows(device, number) != hca.parse("^" + text).allows(device, number)


# --- GIDs --------------------------------------------------------------------------------------------

TABLE = [
    Gid(0, "fe80::1", "RoCE v1", "eth0"),
    Gid(1, "fe80::1", "RoCE v2", "eth0"),
    Gid(2, "2001:db8::1", "RoCE v1", "eth0"),
    Gid(3, "2001:db8::1", "RoCE v2", "eth0"),
    Gid(4, "::ffff:10.0.0.1", "RoCE v1", "eth0"),
    Gid(5, "::ffff:10.0.0.1", "RoCE v2", "eth0"),
    Gid(6, "::ffff:10.0.1.1", "RoCE v2", "eth0.5"),
]


def test_roce_takes_version_2_over_ipv4_then_ipv6_then_link_local():
    assert ports.choose_gid(TABLE, "Ethernet") == TABLE[5]
    assert ports.choose_gid(TABLE[:5], "Ethernet") == TABLE[3]
    assert ports.choose_gid(TABLE[:3], "Ethernet") == TABLE[1]
    assert ports.choose_gid(TABLE[:1], "Ethernet") is None
    assert ports.choose_gid([], "Ethernet") is None


def test_the_users_gid_index_wins():
    assert ports.choose_gid(TABLE, "Ethernet", 2) == TABLE[2]
    assert ports.choose_gid(TABLE, "Ethernet", 9) is None


def test_infiniband_takes_the_first_gid():
    table = [Gid(1, "fe80::2", "IB"), Gid(0, "fe80::1", "IB")]
    assert ports.choose_gid(table, "InfiniBand") == table[1]


# --- what speaks against a port ------------------------------------------------------------------------

FACT = {
    "name": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "transport": "InfiniBand", "active_mtu": 4096,
    "speed_gbps": 400.0, "lid": 0, "gids": [dataclasses.asdict(gid) for gid in TABLE], "numa": 1,
    "pci": "0000:17:00.0", "dmabuf": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "selection", "gid_index", "why"),
    [
        ({}, None, None, ""),
        ({}, "^mlx5", None, r"HETCCL_IB_HCA=\^mlx5 leaves it out"),
        ({"transport": "iWARP"}, None, None, "iWARP is not supported"),
        ({"state": "DOWN"}, None, None, "it is DOWN"),
        ({"gids": FACT["gids"][:1]}, None, None, "it has no RoCE v2 GID .* it has 0 .RoCE v1 fe80::1"),
        ({}, None, 7, "it has no GID 7 .HETCCL_IB_GID_INDEX.; it has 0 .* 5 .RoCE v2 10.0.0.1"),
        ({"gids": FACT["gids"][:1]}, None, 0, ""),
    ],
)
def test_an_unusable_port_says_why(changes, selection, gid_index, why):
    found = ports.from_native({**FACT, **changes}, selection and hca.parse(selection), gid_index)
    assert re.fullmatch(why + ".*" if why else "", found.why_not), found.why_not


def test_a_port_survives_publishing():
    one = ports.from_native(FACT, None, None)
    assert Port.from_record(one.record()) == one and one.name == "mlx5_0:1" and one.gid == TABLE[5]


def test_ports_that_cannot_reach_each_other():
    ib = port("ib", link_layer="InfiniBand", gid=Gid(0, "fe80::1", "IB"))
    other = dataclasses.replace(ib, device="ib9", gid=Gid(0, "fec0::1", "IB"))
    v6 = port("six", gid=TABLE[3])
    assert ports.mismatch(port(), port("mlx5_9", gid=TABLE[6])) == ""
    assert "is Ethernet, ib:1 InfiniBand" in ports.mismatch(port(), ib)
    assert "RoCE v2 over IPv4, six:1 RoCE v2 over IPv6" in ports.mismatch(port(), v6)
    assert "different InfiniBand subnets" in ports.mismatch(ib, other)


# --- distances ------------------------------------------------------------------------------------------

ROOT = ("pci0000:00", "0000:00:01.0")
SWITCH = (*ROOT, "0000:01:00.0")
GPU = Place((*SWITCH, "0000:02:00.0", "0000:03:00.0"), 0)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Place((*SWITCH, "0000:02:01.0", "0000:04:00.0"), 0), Distance.PIX),
        (Place((*SWITCH, "0000:02:00.0", "0000:03:00.1"), 0), Distance.PIX),
        (Place((*SWITCH, "0000:02:02.0", "0000:05:00.0", "0000:06:00.0", "0000:07:00.0"), 0), Distance.PXB),
        (Place(("pci0000:00", "0000:00:02.0", "0000:08:00.0"), 0), Distance.PHB),
        (Place(("pci0000:80", "0000:80:01.0", "0000:81:00.0"), 0), Distance.NODE),
        (Place(("pci0000:80", "0000:80:01.0", "0000:81:00.0"), 1), Distance.SYS),
        (Place((), 0), Distance.NODE),
        (Place((), -1), Distance.UNKNOWN),
    ],
)
def test_distances(other, expected):
    assert distance(GPU, other) == distance(other, GPU) == expected


def test_paths_of_sys():
    real = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/infiniband/mlx5_0"
    assert path_of(real) == GPU.path
    assert path_of("/sys/devices/virtual/infiniband/rxe0") == () == path_of("")


def test_a_process_sits_where_all_its_cpus_are(tmp_path):
    for node, cpus in (("node0", "0-3,8\n"), ("node1", "4-7\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert discover.place_of_process([0, 8], tmp_path).numa == 0
    assert discover.place_of_process([4, 5], tmp_path).numa == 1
    assert discover.place_of_process([3, 4], tmp_path).numa == -1
    assert discover.place_of_process([3], tmp_path / "none").numa == -1


def test_a_machine_without_devices_is_an_ordinary_one(monkeypatch):
    from jax_hetccl import _native

    def fails():
        raise RuntimeError("hetccl: libibverbs.so.1 cannot be opened")

    monkeypatch.setattr(_native, "rdma_devices", fails)
    assert discover.find() == discover.Found((), "libibverbs.so.1 cannot be opened")
    monkeypatch.setattr(_native, "rdma_devices", list)
    assert discover.find() == discover.Found((), "no RDMA device")
    monkeypatch.setattr(_native, "rdma_devices", lambda: [FACT])
    [found] = discover.find(hca.parse("=mlx5_0"), 6).ports
    assert found.gid == TABLE[6] and not found.why_not


# --- who takes what --------------------------------------------------------------------------------------


def first(chosen, rank: int) -> str:
    return chosen[rank][0].port.name


def test_each_rank_takes_its_nearest_port():
    near, far = port("mlx5_0"), port("mlx5_1")
    chosen = choose.assign(
        {
            0: seat((near, Distance.PIX), (far, Distance.SYS)),
            1: seat((near, Distance.SYS), (far, Distance.PXB)),
            2: seat((near, Distance.PIX), (far, Distance.SYS)),
        }
    )
    assert [first(chosen, rank) for rank in range(3)] == ["mlx5_0:1", "mlx5_1:1", "mlx5_0:1"]
    assert chosen[0][0].why == "the nearest: one PCIe switch between them"
    assert chosen[0][1].why == "farther: another NUMA node"


def test_equally_near_ports_are_shared_out():
    four = [(port(f"mlx5_{i}"), Distance.NODE) for i in range(4)]
    chosen = choose.assign({rank: seat(*four) for rank in range(8)})
    assert [first(chosen, rank) for rank in range(8)] == [f"mlx5_{i}:1" for i in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert "as near as mlx5_1:1, mlx5_2:1, mlx5_3:1, shared out" in chosen[0][0].why


def test_ranks_of_other_hosts_do_not_count():
    two = [(port("mlx5_0"), Distance.NODE), (port("mlx5_1"), Distance.NODE)]
    chosen = choose.assign({rank: seat(*two, host=f"host{rank % 2}") for rank in range(4)})
    assert [first(chosen, rank) for rank in range(4)] == ["mlx5_0:1", "mlx5_0:1", "mlx5_1:1", "mlx5_1:1"]


def test_cards_before_their_second_ports():
    every = [(port(f"mlx5_{i}", n), Distance.NODE) for i in range(2) for n in (1, 2)]
    chosen = choose.assign({rank: seat(*every) for rank in range(4)})
    assert [first(chosen, rank) for rank in range(4)] == ["mlx5_0:1", "mlx5_1:1", "mlx5_0:2", "mlx5_1:2"]


def test_shares_follow_speed():
    fast, slow = port("fast", speed=400.0), port("slow", speed=100.0)
    chosen = choose.assign({rank: seat((slow, Distance.NODE), (fast, Distance.NODE)) for rank in range(5)})
    assert collections.Counter(first(chosen, rank) for rank in range(5)) == {"fast:1": 4, "slow:1": 1}


def test_unusable_ports_are_not_taken():
    down = port("mlx5_0", why_not="it is DOWN")
    chosen = choose.assign(
        {0: seat((down, Distance.PIX), (port("mlx5_1"), Distance.SYS)), 1: seat((down, Distance.PIX))}
    )
    assert [c.port.name for c in chosen[0]] == ["mlx5_1:1"] and chosen[0][0].index == 1 and chosen[1] == ()
    assert chosen[0][0].why == "the only usable port (another NUMA node)"


levels = st.sampled_from(Distance)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(levels, min_size=3, max_size=3)), min_size=1, max_size=12))
def test_nobody_takes_a_farther_port_and_equal_ones_are_even(drawn):
    cards = [port(f"mlx5_{i}") for i in range(3)]
    seats = {r: seat(*zip(cards, d, strict=True), host=str(h)) for r, (h, d) in enumerate(drawn)}
    chosen = choose.assign(seats)
    for rank, options in chosen.items():
        assert options[0].distance == min(seats[rank].distances)
        assert sorted(o.index for o in options) == [0, 1, 2]
        assert [o.distance for o in options] == sorted(o.distance for o in options)
    alike = {r: seat(*((c, Distance.NODE) for c in cards)) for r in seats}
    counts = collections.Counter(first(choose.assign(alike), rank) for rank in alike)
    assert max(counts.values()) - min(counts.get(c.name, 0) for c in cards) <= 1


# --- pairs -----------------------------------------------------------------------------------------------


def pair(one: Seat, other: Seat) -> Link | NoLink:
    chosen = choose.assign({0: one, 1: other})
    return choose.link(one, other, chosen[0], chosen[1])


def test_a_pair_meets_through_its_first_ports():
    link = pair(seat((port("a"), Distance.PIX)), seat((port("b"), Distance.PIX), host="other", owner="right/0"))
    assert isinstance(link, Link) and str(link) == "a:1 here and b:1 there"


def test_a_pair_takes_further_ports_if_the_first_do_not_fit():
    ib = port("ib", link_layer="InfiniBand", gid=Gid(0, "fe80::1", "IB"))
    one = seat((ib, Distance.PIX), (port("roce"), Distance.SYS))
    link = pair(one, seat((port("b"), Distance.PIX), host="other", owner="right/0"))
    assert isinstance(link, Link) and link.mine.port.name == "roce:1" and link.mine.index == 1


def test_a_pair_without_ports_says_whose_fault_it_is():
    good = seat((port("a"), Distance.PIX))
    none = seat(owner="right/0", missing="libibverbs.so.1 cannot be opened")
    link = pair(good, none)
    assert link == NoLink("right/0 has no usable port (libibverbs.so.1 cannot be opened)", surprising=False)
    down = seat((port("b", why_not="it is DOWN"), Distance.PIX), owner="right/0")
    assert pair(good, down) == NoLink("right/0 has no usable port (b:1: it is DOWN)", surprising=True)
    out = seat((port("b", why_not="HETCCL_IB_HCA=^b leaves it out"), Distance.PIX), owner="right/0")
    assert pair(good, out) == NoLink("right/0 has no usable port (b:1: HETCCL_IB_HCA=^b leaves it out)", False)
    ib = seat((port("ib", link_layer="InfiniBand", gid=Gid(0, "fe80::1", "IB")), Distance.PIX), owner="right/0")
    assert pair(good, ib) == NoLink("left/0 and right/0: a:1 is Ethernet, ib:1 InfiniBand", surprising=True)


def test_transports_in_the_order_of_trying():
    assert choose.attempts("auto", "", "") == ("shm", "rdma", "tcp")
    assert choose.attempts("auto", "", "no port") == ("shm", "tcp")
    assert choose.attempts("auto", "another host", "") == ("rdma", "tcp")
    assert choose.attempts("auto", "another host", "no port") == ("tcp",)
    for wanted in ("shm", "rdma", "tcp"):
        assert choose.attempts(wanted, "another host", "no port") == (wanted,)


def test_where_slots_lie():
    able, plain = port("mlx5_0", dmabuf=True), port("rxe0")
    for exports in (1, None):
        assert choose.slots(able, exports, gpu=True) == (
            "device", "if mlx5_0 registers it by dma-buf or as peer memory, which is tried when a channel opens; else host",
        )  # fmt: skip
    assert "mlx5_0 registers it as peer memory (the accelerator exports no" in choose.slots(able, 0, gpu=True)[1]
    assert "rxe0 registers it as peer memory (the installed libibverbs" in choose.slots(plain, 1, gpu=True)[1]
    assert choose.slots(able, None, gpu=False) == ("host", "a CPU's memory is the host's")
