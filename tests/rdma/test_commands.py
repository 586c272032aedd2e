"""What `hetccl doctor` and `hetccl topo` show of real devices."""

from __future__ import annotations

from typing import Any

import lab
import pytest

from jax_hetccl import cli
from jax_hetccl.rdma import bindings, discover


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command with settings; returns what it prints."""

    def run(*command: str, **settings: str) -> str:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        assert cli.main([*command, "--plain"]) == 0
        return capsys.readouterr().out

    return run


def test_topo_shows_ports_choice_and_transports(shown) -> None:
    text = shown("topo", HETCCL_IB_HCA="rxe")
    assert "rxe0:1 | Ethernet 10 Gb/s MTU 4096 ACTIVE | 1: RoCE v2 10.77.0.1" in text
    assert "siw0:1" in text and "no: HETCCL_IB_HCA=rxe leaves it out" in text
    assert "cpu | rxe0:1 | as near as rxe1:1, shared out by speed (not known how far) | host memory" in text
    assert "another host | rdma | if it has a port that speaks RoCE v2 over IPv4" in text


def test_topo_shows_a_link_that_is_down(shown) -> None:
    lab.turn("vethA", "down")
    text = shown("topo", HETCCL_TRANSPORT="rdma", HETCCL_IB_HCA="=rxe0")
    assert "no: it is DOWN" in text and "another host | none | no port here is usable" in text


def test_doctor_shows_ports_and_why_a_device_is_not_used(shown) -> None:
    text = shown("doctor")
    assert "ok  RDMA port rxe0:1: ACTIVE, Ethernet, 10 Gb/s, MTU 4096, GID 1 RoCE v2 10.77.0.1 on vethA" in text
    assert "note  RDMA port siw0:1" in text and "iWARP is not supported" in text
    assert "RDMA for cpu: rxe0:1" in text and "slots in pinned host memory" in text


def test_the_bindings_see_the_same_devices(pyverbs_peer) -> None:
    found = {details.name: details for details in bindings.describe()}
    assert set(found) == {port.device for port in discover.find().ports}
    assert not found["rxe0"].why_not and found["rxe0"].max_qp > 0 and found["rxe0"].max_mr_size > 1 << 30


def test_both_say_what_becomes_of_registrations(shown) -> None:
    why_not = {port.device: port.no_odp for port in discover.find(odp=True).ports}["rxe0"]
    said = f"buffers are registered for each exchange: {why_not}" if why_not else "registrations of buffers are kept"
    assert f"| host memory: a CPU's memory is the host's; {said}\n" in shown("topo", HETCCL_IB_ODP="1")
    assert f"slots in pinned host memory: a CPU's memory is the host's; {said}\n" in shown("doctor")
    assert said not in shown("topo", HETCCL_IB_ODP="0")
