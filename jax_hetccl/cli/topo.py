"""`hetccl topo`: which network card each accelerator takes, and which transport each pair uses."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_hetccl._config import lookup
from jax_hetccl._errors import ConfigError
from jax_hetccl.rdma import choose
from jax_hetccl.rdma.machine import Machine, Rank, ranks, this_machine, transport

_DESCRIPTION = """\
Shows accelerators, RDMA ports, their distances, the port that a rank on each accelerator would take and why, and the
transport that each pair of ranks would use, as HETCCL_TRANSPORT, HETCCL_IB_HCA, HETCCL_IB_GID_INDEX and HETCCL_IB_ODP
say. Starts nothing. To see pairs of several machines, write each one's `hetccl topo --json` into a file and name the files:

  ssh b hetccl topo --json > b.json && hetccl topo b.json
"""

Row = tuple[str, ...]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "topo",
        help="show accelerators, network cards, and which transport each pair uses",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("machines", nargs="*", type=Path, metavar="FILE", help="other machines, as --json wrote them")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="lines instead of tables")
    how.add_argument("--json", action="store_true", help="this machine for another one's `hetccl topo FILE`")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    try:
        settings = lookup("transport", "ib_hca", "ib_gid_index", "ib_odp", "tls")
        machines = [this_machine(settings.get("ib_hca"), settings.get("ib_gid_index"), settings.get("ib_odp", False))]
        machines += [_read(path) for path in arguments.machines]
    except (ConfigError, ValueError) as error:
        print(f"hetccl topo: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(machines[0].record(), indent=1))
        return 0
    show = _plain if arguments.plain else _table
    taken = ranks(machines)
    show("RDMA ports", ("machine", "port", "link", "GID", "PCI", "NUMA", "usable"), port_rows(machines))
    for machine in machines:
        if machine.ports:
            names = [port.name for port in machine.ports]
            show(f"distances on {machine.name}", ("accelerator", "PCI", "NUMA", *names), distance_rows(machine))
    show("ports taken", ("rank", "port", "why", "slots"), taken_rows(taken))
    no_rdma = choose.NOT_ENCRYPTED if settings.get("tls") else ""
    show("transports", ("pair", "transport", "why"), pair_rows(taken, settings.get("transport", "auto"), no_rdma))
    return 0


def _read(path: Path) -> Machine:
    try:
        return Machine.from_record(json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not what `hetccl topo --json` of this version writes") from None


def port_rows(machines: Sequence[Machine]) -> list[Row]:
    """Every port; a machine without one says why."""
    rows: list[Row] = []
    for machine in machines:
        for port in machine.ports:
            speed = f"{port.speed:g} Gb/s " if port.speed else ""
            gid = f"{port.gid.index}: {port.gid.type} {port.gid.address}" if port.gid else ""
            link = f"{port.link_layer} {speed}MTU {port.mtu} {port.state}"
            rows.append(
                (machine.name, port.name, link, gid, port.pci, _numa(port.numa), port.why_not and f"no: {port.why_not}")
            )
        if not machine.ports:
            rows.append((machine.name, "none", "", "", "", "", f"no: {machine.missing}"))
    return [(*row[:-1], row[-1] or "yes") for row in rows]


def distance_rows(machine: Machine) -> list[Row]:
    """Accelerators by ports, in the levels of `nvidia-smi topo`."""
    return [
        (accelerator.name, accelerator.pci, _numa(accelerator.numa), *(distance.name for distance in row))
        for accelerator, row in zip(machine.accelerators, machine.distances, strict=True)
    ]


def taken_rows(taken: Sequence[Rank]) -> list[Row]:
    """The first port of every rank, and where its slots lie."""
    rows: list[Row] = []
    for rank in taken:
        if not rank.choices:
            rows.append((_name(rank), "none", rank.machine.missing or "no port is usable", ""))
            continue
        choice = rank.choices[0]
        where, why = choose.slots(choice.port, rank.accelerator.dma_buf, rank.accelerator.gpu)
        rows.append((_name(rank), choice.port.name, choice.why, f"{where} memory: {why}"))
    return rows


def pair_rows(taken: Sequence[Rank], wanted: str, no_rdma: str = "") -> list[Row]:
    """The transport of every pair; with one machine also of a pair with a rank elsewhere."""
    rows: list[Row] = []
    machines = {id(rank.machine): rank for rank in taken}
    for rank in machines.values():
        rows.append((f"two ranks of {rank.machine.name}", *transport(wanted, rank, rank, no_rdma)))
    for one, other in itertools.combinations(taken, 2):
        if one.machine is not other.machine:
            rows.append((f"{_name(one)} - {_name(other)}", *transport(wanted, one, other, no_rdma)))
    if len(machines) == 1 and wanted in ("auto", "rdma"):
        rows += [(f"{_name(rank)} - another host", *_elsewhere(rank, wanted, no_rdma)) for rank in taken]
    return rows


def _elsewhere(rank: Rank, wanted: str, no_rdma: str) -> tuple[str, str]:
    without = "tcp" if wanted == "auto" else "none"
    if no_rdma or not rank.choices:
        return without, no_rdma or rank.machine.missing or "no port here is usable"
    port = rank.choices[0].port
    assert port.gid is not None
    return "rdma", f"if it has a port that speaks {port.gid.speaks} and a probe gets through; else {without}"


def _name(rank: Rank) -> str:
    return f"{rank.machine.name} {rank.accelerator.name}"


def _numa(node: int) -> str:
    return "?" if node < 0 else str(node)


def _plain(title: str, header: Row, rows: Sequence[Row]) -> None:
    print(f"{title}: {', '.join(header)}")
    for row in rows:
        print("  " + " | ".join(row))


def _table(title: str, header: Row, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
