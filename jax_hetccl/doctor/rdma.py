"""RDMA: its library, ports, bindings, and where slots would lie."""

from __future__ import annotations

from jax_hetccl._config import lookup
from jax_hetccl._errors import ConfigError
from jax_hetccl.doctor.check import BAD, GOOD, NOTE, Check
from jax_hetccl.rdma import bindings, choose
from jax_hetccl.rdma.machine import Rank, ranks, this_machine
from jax_hetccl.rdma.ports import Port

HINTS = {"it is DOWN": "check the cable and `ip link`; tcp is used without it"}


def rdma_checks() -> list[Check]:
    try:
        settings = lookup("ib_hca", "ib_gid_index", "ib_odp")
    except ConfigError as error:
        return [Check("RDMA settings", str(error).splitlines()[1].strip(" -"), BAD, "correct or unset the variable")]
    machine = this_machine(settings.get("ib_hca"), settings.get("ib_gid_index"), settings.get("ib_odp", False))
    if not machine.ports:
        return [missing_check(machine.missing)]
    return [*map(port_check, machine.ports), *bindings_checks(), *map(slots_check, ranks([machine]))]


def missing_check(why: str) -> Check:
    """There are no ports: an ordinary machine, unless somebody expects some."""
    return Check(
        "RDMA", why, NOTE, "clusters on several hosts use tcp; for RDMA: a NIC and apt-get install libibverbs1"
    )


def port_check(port: Port) -> Check:
    """One port, as an exchange would use it."""
    facts = [port.state, port.link_layer, f"{port.speed:g} Gb/s" if port.speed else "speed unknown", f"MTU {port.mtu}"]
    if port.gid:
        where = f" on {port.gid.netdev}" if port.gid.netdev else ""
        facts.append(f"GID {port.gid.index} {port.gid.type} {port.gid.address}{where}")
    facts.append(f"PCI {port.pci or 'none'}")
    facts.append(f"NUMA node {'unknown' if port.numa < 0 else port.numa}")
    name, text = f"RDMA port {port.name}", ", ".join(facts)
    if port.why_not.startswith("HETCCL_IB_HCA"):
        return Check(name, f"{text}; {port.why_not}")
    if port.why_not:
        return Check(
            name, f"{text}; cannot be used: {port.why_not}", NOTE, HINTS.get(port.why_not, "tcp is used without it")
        )
    return Check(name, text)


def bindings_checks() -> list[Check]:
    """What pyverbs adds; it opens every device, as the engine would."""
    try:
        found = bindings.describe()
    except bindings.BindingsError as error:
        return [Check("pyverbs", str(error), NOTE, "only firmware and limits of RDMA devices are missing")]
    return [details_check(details) for details in found]


def details_check(details: bindings.Details) -> Check:
    """One device."""
    name = f"RDMA device {details.name}"
    if details.why_not:
        fix = "may this process open /dev/infiniband? (containers: --device /dev/infiniband)"
        return Check(name, f"cannot be opened: {details.why_not}", BAD, fix)
    largest = f"memory regions up to {details.max_mr_size / (1 << 30):.4g} GB"
    return Check(name, f"firmware {details.firmware or 'unknown'}, {largest}, {details.max_qp} queue pairs")


def slots_check(rank: Rank) -> Check:
    """The port that an accelerator takes, and the memory of its slots."""
    name = f"RDMA for {rank.accelerator.name}"
    if not rank.choices:
        return Check(name, "no usable port", NOTE, "the lines above say why")
    choice = rank.choices[0]
    where, why = choose.slots(choice.port, rank.accelerator.dma_buf, rank.accelerator.gpu)
    memory = {"device": "device memory", "host": "pinned host memory"}[where]
    return Check(name, f"{choice.port.name}, {choice.why}; slots in {memory}: {why}", GOOD)
