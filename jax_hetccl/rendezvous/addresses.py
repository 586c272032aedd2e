"""Which local address to listen on and to tell the others.

Default: the address that the route to the coordinator uses, since whoever reaches the coordinator can
most likely reach us there. `HETCCL_SOCKET_IFNAME` overrides it. A loopback address is never told to
members that came over a real network.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from jax_hetccl._config import Config, expand_sequence
from jax_hetccl._errors import ConfigError, RendezvousError

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1

# The kernel notices a host or link that is gone within about 7 s.
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 1),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 1),
    # Longer than the control plane takes to find out: a link that is away for 3 s must not end what is idle.
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 6),
)


def interfaces() -> list[tuple[str, str]]:
    """Returns `(name, address)` of every address of every interface that is up, IPv4 first."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
                if not struct.unpack_from("=h", flags, 16)[0] & _IFF_UP:
                    continue
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address, or gone in between
                continue
            found.append((name, socket.inet_ntoa(reply[20:24])))
    return found + _interfaces_v6()


def _interfaces_v6() -> list[tuple[str, str]]:
    found = []
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                raw, *_, name = line.split()
                address = ipaddress.IPv6Address(bytes.fromhex(raw))
                if not address.is_link_local:  # would need a scope that only we know
                    found.append((name, str(address)))
    except OSError:  # IPv6 is off
        pass
    return found


def matches(pattern: str, name: str) -> bool:
    """Returns whether interface `name` is selected by `pattern`, in NCCL's syntax.

    `eth` selects by prefix, `=eth0` exactly, `^docker,lo` all but these, `^=eth0` all but exactly
    this; commas separate alternatives.

    Example:
      >>> matches("^docker,lo", "eth0"), matches("=eth0", "eth01")
      (True, False)
    """
    pattern = pattern.strip()
    exclude = pattern.startswith("^")
    if exclude:
        pattern = pattern[1:]
    exact = pattern.startswith("=")
    if exact:
        pattern = pattern[1:]
    hit = any(name == part if exact else name.startswith(part) for part in expand_sequence(pattern))
    return hit != exclude


# What was found last: after a loss the coordinator's name may be gone with its machine.
_found: dict[tuple[str, int], tuple[int, str]] = {}


def resolve_host(host: str, port: int) -> tuple[int, str]:
    """Looks up `host`; returns the address family and address, those of last time if it is not known any more.

    Raises:
      RendezvousError: it has never been known.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        if (host, port) in _found:
            return _found[host, port]
        raise RendezvousError(
            f"the coordinator's host {host!r} cannot be resolved ({error}); check HETCCL_COORDINATOR"
        ) from None
    infos.sort(key=lambda info: info[0] != socket.AF_INET)  # both exist: IPv4, as most listeners do
    _found[host, port] = infos[0][0], str(infos[0][4][0])
    return _found[host, port]


def local_address(config: Config) -> str:
    """Returns the address this process listens on and tells the others.

    Raises:
      ConfigError: no interface matches HETCCL_SOCKET_IFNAME, or only loopback does although the
        coordinator is on a real network.
    """
    if config.loopback:
        return resolve_host(*config.coordinator)[1]
    found = interfaces()
    if config.socket_ifname:
        chosen = [(n, a) for n, a in found if matches(config.socket_ifname, n)]
        usable = [a for _, a in chosen if not ipaddress.ip_address(a).is_loopback]
        if usable:
            return usable[0]
        have = ", ".join(f"{n} ({a})" for n, a in found) or "none"
        why = "selects only loopback, which other machines cannot reach" if chosen else "matches no interface"
        raise ConfigError(f"HETCCL_SOCKET_IFNAME={config.socket_ifname!r} {why}; interfaces here: {have}")
    family, target = resolve_host(*config.coordinator)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, config.coordinator[1]))  # UDP: picks a route, sends nothing
            routed = probe.getsockname()[0]
    except OSError:
        routed = "127.0.0.1"
    if not ipaddress.ip_address(routed).is_loopback:
        return routed
    # The coordinator's name maps to loopback here (as /etc/hosts often does for the own host name).
    for _, address in found:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        f"no network interface but loopback is up, yet the coordinator {config.coordinator_text} is not a "
        "loopback address; use HETCCL_COORDINATOR=localhost:PORT for a job on one machine"
    )


def listen_tcp(address: str, port_range: tuple[int, int] | None, backlog: int = 128) -> socket.socket:
    """Returns a listening TCP socket on `address`, on a free port of `port_range`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    low, high = port_range or (0, 0)
    for port in range(low, high + 1):
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Not SO_REUSEADDR with fixed ports: two processes searching one range must not share a port.
            listener.bind((address, port))
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            if port_range is None:
                raise RendezvousError(f"cannot listen on {address}: {error}") from None
    raise RendezvousError(f"no free port on {address} in HETCCL_PORT_RANGE={low}-{high}; widen the range")


def endpoint(address: str, port: int) -> str:
    """Returns ZeroMQ's name of a TCP address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def set_keepalive(sock: socket.socket) -> None:
    """Lets the kernel notice a vanished host behind an idle TCP socket."""
    with contextlib.suppress(OSError):
        for option, level, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)
