"""ZeroMQ sockets of the control plane, set up one way everywhere: CURVE, bounded, with keep-alive."""

from __future__ import annotations

import zmq

from jax_hetccl._errors import RendezvousError
from jax_hetccl.rendezvous import addresses, messages

# Liveness is the kernel's: it acknowledges heartbeats (`link`) and keep-alive probes also for a process that is stopped
# or busy compiling, and stops when its host or link is gone. A heartbeat that nobody acknowledges for this long breaks the
# connection: longer than a link that is away for 3 s, and short enough for 5 s until everybody raises the error.
_KEEPALIVE = ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 1), (zmq.TCP_KEEPALIVE_INTVL, 1))
_KEEPALIVE_COUNT = 3
_UNACKNOWLEDGED_MS = 3100

# A client that does not finish its handshake in this time is dropped.
_HANDSHAKE_MS = 10_000


def _common(sock: zmq.Socket) -> None:
    sock.linger = 0
    sock.maxmsgsize = messages.MAX_BYTES
    sock.ipv6 = True
    sock.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    for option, value in _KEEPALIVE:
        sock.set(option, value)
    sock.set(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT)
    sock.set(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


def server(context: zmq.Context, keys: tuple[bytes, bytes]) -> zmq.Socket:
    """Returns an unbound ROUTER that speaks CURVE as server with `keys` (public, secret).

    Strangers reach it: see `doorkeeper.Doorkeeper` for how many, and `messages.PORT_BYTES` for how much they may send.
    It admits nobody without a `zap.Gate` in its context, neither before there is one nor after it was closed.
    """
    sock = context.socket(zmq.ROUTER)
    _common(sock)
    sock.maxmsgsize = messages.PORT_BYTES
    sock.set(zmq.BACKLOG, 1024)
    sock.curve_server = True
    # With a domain that is enforced libzmq refuses where no gate answers; by default it would admit.
    sock.zap_domain = b"hetccl"
    sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    sock.curve_publickey, sock.curve_secretkey = keys
    return sock


def client(context: zmq.Context, keys: tuple[bytes, bytes], server_key: bytes) -> zmq.Socket:
    """Returns an unconnected DEALER that speaks CURVE with `keys` to the server with `server_key`."""
    sock = context.socket(zmq.DEALER)
    _common(sock)
    sock.set(zmq.RECONNECT_IVL, 100)
    sock.set(zmq.RECONNECT_IVL_MAX, 1000)
    sock.curve_serverkey = server_key
    sock.curve_publickey, sock.curve_secretkey = keys
    return sock


def bind_free(sock: zmq.Socket, address: str, port_range: tuple[int, int] | None) -> int:
    """Binds `sock` to a free port of `address`; returns the port."""
    low, high = port_range or (0, 0)
    for port in range(low, high + 1):
        try:
            sock.bind(addresses.endpoint(address, port))
            return int(sock.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        except zmq.ZMQError as error:
            if port_range is None:
                raise RendezvousError(f"cannot listen on {address}: {error}") from None
    raise RendezvousError(f"no free port on {address} in HETCCL_PORT_RANGE={low}-{high}; widen the range")
