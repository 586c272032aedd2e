"""hetccl topo, and RDMA in hetccl doctor, on machines that the tests describe."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any

import pytest

from jax_hetccl import _native, cli
from jax_hetccl._config import lookup
from jax_hetccl._errors import ConfigError
from jax_hetccl.cli import topo
from jax_hetccl.doctor import BAD, GOOD, NOTE
from jax_hetccl.doctor import rdma as rdma_doctor
from jax_hetccl.rdma import bindings, machine
from jax_hetccl.rdma.machine import Accelerator, Machine, ranks
from jax_hetccl.rdma.places import Distance
from jax_hetccl.rdma.ports import Gid, Port


def port(device: str, address: str = "10.0.0.1", **facts) -> Port:
    gid = Gid(3, f"::ffff:{address}", "RoCE v2", "eth0")
    usual = dict(numa=0, pci="0000:17:00.0", dmabuf=True)
    return Port(device, 1, "ACTIVE", "Ethernet", "InfiniBand", 4096, 400.0, 0, gid, **{**usual, **facts})


def box(name: str, *ports: Port, gpus: int = 2) -> Machine:
    """A machine whose n-th GPU sits beside its n-th port."""
    accelerators = tuple(Accelerator(f"cuda {i}", f"0000:{i:02x}:00.0", 0, 1) for i in range(gpus))
    rows = tuple(tuple(Distance.PIX if p == i else Distance.SYS for p in range(len(ports))) for i in range(gpus))
    return Machine(name, f"boot of {name}", accelerators, ports, "" if ports else "no RDMA device", rows)


def test_machines_survive_json():
    one = box("a", port("mlx5_0"), port("mlx5_1", why_not="it is DOWN"))
    assert Machine.from_record(json.loads(json.dumps(one.record()))) == one


def test_each_gpu_takes_the_port_beside_it():
    rows = topo.taken_rows(ranks([box("a", port("mlx5_0"), port("mlx5_1"))]))
    assert [row[:3] for row in rows] == [
        ("a cuda 0", "mlx5_0:1", "the nearest: one PCIe switch between them"),
        ("a cuda 1", "mlx5_1:1", "the nearest: one PCIe switch between them"),
    ]
    assert rows[0][3].startswith(
        "device memory: if mlx5_0 registers it by dma-buf or as peer memory, which is tried when"
    )


def test_pairs_of_two_machines():
    every = ranks([box("a", port("mlx5_0"), port("mlx5_1")), box("b", port("mlx5_7"), gpus=1)])
    rows = {pair: (transport, why) for pair, transport, why in topo.pair_rows(every, "auto")}
    assert rows["two ranks of a"] == rows["two ranks of b"] == ("shm", "one host")
    assert (
        rows["a cuda 1 - b cuda 0"][0] == "rdma"
        and "mlx5_1:1 to mlx5_7:1, if a probe" in rows["a cuda 1 - b cuda 0"][1]
    )
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("wanted", "here", "between", "why"),
    [
        ("auto", "shm", "tcp", "b has no usable port (no RDMA device)"),
        ("rdma", "rdma", "none", "HETCCL_TRANSPORT=rdma, but b has no usable port"),
        ("shm", "shm", "none", "HETCCL_TRANSPORT=shm, but the ranks run on two hosts"),
        ("tcp", "tcp", "tcp", "HETCCL_TRANSPORT=tcp"),
    ],
)
def test_what_a_pair_uses_and_why(wanted, here, between, why):
    every = ranks([box("a", port("mlx5_0"), gpus=1), box("b", gpus=1)])
    rows = {pair: (transport, text) for pair, transport, text in topo.pair_rows(every, wanted)}
    assert rows["two ranks of a"][0] == here
    assert rows["a cuda 0 - b cuda 0"][0] == between and why in rows["a cuda 0 - b cuda 0"][1]


def test_one_machine_alone_says_what_another_host_would_need():
    rows = topo.pair_rows(ranks([box("a", port("mlx5_0"), gpus=1)]), "auto")
    assert rows[-1][:2] == ("a cuda 0 - another host", "rdma") and "RoCE v2 over IPv4" in rows[-1][2]
    assert topo.pair_rows(ranks([box("a", gpus=1)]), "auto")[-1] == ("a cuda 0 - another host", "tcp", "no RDMA device")


FACT: dict[str, Any] = {
    "name": "rxe0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "transport": "InfiniBand", "active_mtu": 4096,
    "speed_gbps": 10.0, "lid": 0, "numa": -1, "pci": "", "dmabuf": False,
    "gids": [{"index": 1, "gid": "0000:0000:0000:0000:0000:ffff:0a4d:0001", "type": "RoCE v2", "netdev": "vethA"}],
}  # fmt: skip


@pytest.fixture
def native(monkeypatch) -> list[dict[str, Any]]:
    """The ports that the native module finds."""
    found = [dict(FACT)]
    monkeypatch.setattr(_native, "rdma_devices", lambda: found)
    monkeypatch.setattr(machine, "_gpus", lambda: iter(()))
    for name in ("HETCCL_TRANSPORT", "HETCCL_IB_HCA", "HETCCL_IB_GID_INDEX", "HETCCL_IB_ODP"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_the_command(native, capsys, tmp_path):
    assert cli.main(["topo", "--json"]) == 0
    text = capsys.readouterr().out
    other = json.loads(text) | {"name": "other", "boot": "another kernel"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert cli.main(["topo", "--plain", str(tmp_path / "other.json")]) == 0
    lines = capsys.readouterr().out
    assert "rxe0:1 | Ethernet 10 Gb/s MTU 4096 ACTIVE | 1: RoCE v2 10.77.0.1 |  | ? | yes" in lines
    assert "other cpu | rdma | rxe0:1 to rxe0:1, if a probe gets through" in lines
    assert "host memory: a CPU's memory is the host's" in lines
    assert cli.main(["topo"]) == 0
    assert "transports" in capsys.readouterr().out


def test_the_command_follows_the_settings(native, capsys, monkeypatch):
    monkeypatch.setenv("HETCCL_IB_HCA", "^rxe")
    monkeypatch.setenv("HETCCL_TRANSPORT", "rdma")
    assert cli.main(["topo", "--plain"]) == 0
    lines = capsys.readouterr().out
    assert (
        "no: HETCCL_IB_HCA=^rxe leaves it out" in lines
        and "cpu - another host | none | no port here is usable" in lines
    )
    monkeypatch.setenv("HETCCL_IB_HCA", "rxe0:x")
    assert cli.main(["topo"]) == 2
    assert "HETCCL_IB_HCA='rxe0:x': 'rxe0:x': expected a list such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "why_not", "said"),
    [
        ("0", "no paging here", "a CPU's memory is the host's"),
        ("1", "", "a CPU's memory is the host's; registrations of buffers are kept"),
        (
            "1",
            "no paging here",
            "a CPU's memory is the host's; buffers are registered for each exchange: no paging here",
        ),
    ],
)
def test_topo_and_the_doctor_say_what_becomes_of_registrations(native, capsys, monkeypatch, setting, why_not, said):
    asked = []
    monkeypatch.setattr(_native, "why_not_on_demand", lambda rdma: asked.append(rdma) or why_not)
    native.append({**FACT, "name": "rxe1", "state": "DOWN"})
    monkeypatch.setenv("HETCCL_IB_ODP", setting)
    assert cli.main(["topo", "--plain"]) == 0
    assert f"host memory: {said}\n" in capsys.readouterr().out
    checks = {c.name: c for c in rdma_doctor.rdma_checks()}
    assert checks["RDMA for cpu"].found.endswith(f"slots in pinned host memory: {said}")
    assert checks["RDMA for cpu"].state == GOOD
    assert asked == [{"device": "rxe0", "port": 1, "gid_index": 1}] * 2 * int(setting), "usable ports alone are tried"


def test_wrong_files_are_named(native, capsys, tmp_path):
    assert cli.main(["topo", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("[1]")
    assert cli.main(["topo", str(tmp_path / "x.json")]) == 2
    assert "is not what `hetccl topo --json` of this version writes" in capsys.readouterr().err


def test_settings_outside_of_a_world():
    assert lookup("ib_gid_index", "transport", environ={"HETCCL_IB_GID_INDEX": "-1", "HETCCL_TIMEOUT": "x"}) == {
        "ib_gid_index": None
    }
    with pytest.raises(ConfigError, match="HETCCL_TRANSPORT='rmda': expected one of .* did you mean rdma?"):
        lookup("transport", environ={"HETCCL_TRANSPORT": "rmda"})


# --- the doctor -------------------------------------------------------------------------------------------


def test_the_doctor_shows_ports_and_slots(native, monkeypatch):
    monkeypatch.setattr(bindings, "describe", lambda: [bindings.Details("rxe0", "1.2", 1 << 40, 64)])
    native.append({**FACT, "name": "rxe1", "state": "DOWN"})
    checks = {c.name: c for c in rdma_doctor.rdma_checks()}
    assert checks["RDMA port rxe0:1"].state == GOOD
    assert "GID 1 RoCE v2 10.77.0.1 on vethA" in checks["RDMA port rxe0:1"].found
    assert checks["RDMA port rxe1:1"].state == NOTE and "cannot be used: it is DOWN" in checks["RDMA port rxe1:1"].found
    assert checks["RDMA device rxe0"].found == "firmware 1.2, memory regions up to 1024 GB, 64 queue pairs"
    assert checks["RDMA for cpu"].found == (
        "rxe0:1, the only usable port (not known how far); slots in pinned host memory: a CPU's memory is the host's"
    )


def test_the_doctor_without_ports(native, monkeypatch):
    native.clear()
    [check] = rdma_doctor.rdma_checks()
    assert check.state == NOTE and check.found == "no RDMA device"
    monkeypatch.setenv("HETCCL_IB_GID_INDEX", "x")
    [check] = rdma_doctor.rdma_checks()
    assert check.state == BAD and "HETCCL_IB_GID_INDEX='x': expected 0, 1, 2" in check.found


def test_a_device_that_may_not_be_opened():
    check = rdma_doctor.details_check(bindings.Details("mlx5_0", why_not="Failed to open device: Permission denied"))
    assert check.state == BAD and "--device /dev/infiniband" in check.fix


def test_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyverbs", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    with pytest.raises(bindings.BindingsError, match=r"jax-hetccl\[rdma\]"):
        bindings.describe()

    class Context:
        """A twin of pyverbs' device context; the second device may not be opened."""

        def __init__(self, name: str) -> None:
            if name != "mlx5_0":
                raise RuntimeError("Permission denied")

        def __enter__(self) -> Context:
            return self

        def __exit__(self, *_: object) -> None: ...

        def query_device(self) -> Any:
            return types.SimpleNamespace(fw_version="22.1\0", max_mr_size=1 << 30, max_qp=8)

    twin: Any = types.ModuleType("pyverbs.device")
    twin.get_device_list = lambda: [types.SimpleNamespace(name=n) for n in (b"mlx5_0", b"mlx5_1")]
    twin.Context = Context
    monkeypatch.setitem(sys.modules, "pyverbs", types.ModuleType("pyverbs"))
    monkeypatch.setitem(sys.modules, "pyverbs.device", twin)
    first, second = bindings.describe()
    assert dataclasses.astuple(first) == ("mlx5_0", "22.1", 1 << 30, 8, "")
    assert second.why_not == "Permission denied"
