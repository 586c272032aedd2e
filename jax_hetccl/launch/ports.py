"""A TCP port for a world that lives on this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
