"""HETCCL_CHECKSUM=1: a bit that flips on a TCP connection is an error that names the link, before anybody uses the data."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from native_calls import add_plan, current_engine, header, read, swap_and_check

from jax_hetccl import _native
from jax_hetccl._config import resolve

CHUNK = 256 * 1024
STRIPED_ABOVE = 256 * 1024


def crc32c(data: bytes) -> bytes:
    """As RFC 3720 defines it, bit by bit over a table of bytes; little endian."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def _shifted(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_TABLE = [_shifted(byte) for byte in range(256)]


class Streams:
    """The other end of both channels of rank 0, over TCP connections."""

    def __init__(self, engine: _native.Engine) -> None:
        self.inbox, self.outbox = self._open(engine, True), self._open(engine, False)

    def _open(self, engine: _native.Engine, outgoing: bool) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        engine.add_channel(local_rank=0, peer_rank=1, outgoing=outgoing, transport="tcp", fds=[theirs.detach()])
        ours.settimeout(10)
        return ours

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()


@pytest.fixture
def streams() -> Iterator[tuple[_native.Engine, Streams]]:
    with current_engine(timeout_s=5.0, arrival_timeout_s=5.0, checksum=True) as engine:
        made = Streams(engine)
        yield engine, made
        made.close()


def framed(payload: bytes) -> bytes:
    """What a peer sends: header, payload in chunks, and the checksum of each."""
    head = header(len(payload))
    chunks = [payload[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]
    return b"".join(part + crc32c(part) for part in (head, *chunks))


def test_the_checksum_is_the_standard_one() -> None:
    assert crc32c(b"123456789") == (0xE3069283).to_bytes(4, "little")


def test_both_ends_speak_the_same(streams: tuple[_native.Engine, Streams]) -> None:
    """Against a peer written after the description of the format."""
    engine, peer = streams
    x = np.arange(CHUNK // 4 + 100, dtype=np.float32)
    add_plan(engine, x.nbytes)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: np.asarray(swap_and_check(x)))
        sent = read(peer.inbox, len(framed(x.tobytes())))
        assert sent[200 - 4 :] == framed(x.tobytes())[200 - 4 :]
        assert sent[192:196] == crc32c(sent[:192])
        peer.outbox.sendall(framed((2 * x).tobytes()))
        np.testing.assert_array_equal(result.result(10), 2 * x)
    assert engine.stats()["bytes_sent"] == x.nbytes, "checksums are no payload"


@pytest.mark.parametrize("place", [100, 196, 196 + 5000], ids=["header", "first", "later"])
def test_a_flipped_bit_names_the_link(streams: tuple[_native.Engine, Streams], place: int) -> None:
    engine, peer = streams
    x = np.ones(2000, np.float32)
    add_plan(engine, x.nbytes)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: np.asarray(swap_and_check(x)))
        data = bytearray(framed(x.tobytes()))
        data[place] ^= 0x10
        peer.outbox.sendall(data)
        with pytest.raises(jax.errors.JaxRuntimeError, match="CRC-32C"):
            result.result(10)
    failure = engine.failure()
    assert failure is not None and failure.kind == "corrupt"
    ends = [f"127.0.0.1:{sock}" for sock in (peer.outbox.getsockname()[1], peer.outbox.getpeername()[1])]
    named = ["left/0 rank 0", "right/0 rank 1", "stripe 1 of 1", " to ".join(ends)]
    if place >= 196:
        named += ["psum/data test", "bytes 0 to 8000"]
    for part in named:
        assert part in failure.message, failure.message


def test_the_setting() -> None:
    given = {"HETCCL_COORDINATOR": "localhost:1", "HETCCL_CLUSTERS": "a:1", "HETCCL_CLUSTER": "a"}
    assert resolve(given).checksum is False
    assert resolve({**given, "HETCCL_CHECKSUM": "1"}).checksum is True
