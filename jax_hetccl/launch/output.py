"""Lines of many processes on one terminal: `[left/0] text`, standard output and error kept apart."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import BinaryIO, Protocol

MAX_LINE = 64 * 1024  # a longer "line" is passed on in pieces instead of being kept in memory
REDRAW_S = 1.0  # progress bars rewrite one line many times a second
_COLOURS = (36, 33, 35, 32, 34, 31)


class Sink(Protocol):
    """Where the lines of all processes go. Called on the supervisor's thread only."""

    def line(self, cluster: int, name: str, stream: int, text: bytes) -> None:
        """Takes one line without its end. `stream` is 1 (standard output) or 2 (standard error)."""
        ...

    def flush(self) -> None:
        """Called after each batch of lines."""
        ...


class LineSplitter:
    """Cuts one stream into lines; keeps a partial line until the rest comes.

    A carriage return ends a line too (progress bars), but such lines are let through only once per
    `REDRAW_S`, the last one always.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held = b""
        self._redraw: bytes | None = None
        self._last_redraw = float("-inf")
        self._clock = clock

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Takes what was read; yields each line that is now complete, without its end."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if line.endswith(b"\r"):  # "\r\n"
                line = line[:-1]
            *redrawn, line = line.split(b"\r")
            yield from self._redrawn(redrawn)
            if line or not redrawn:
                self._redraw = None
                yield line
            else:
                yield from self._last()
        *redrawn, self._held = self._split_open(self._held)
        yield from self._redrawn(redrawn)
        while len(self._held) > MAX_LINE:
            yield self._held[:MAX_LINE]
            self._held = self._held[MAX_LINE:]

    def finish(self) -> Iterable[bytes]:
        """The stream has ended: yields what is left."""
        held, self._held = self._held.rstrip(b"\r"), b""
        if held:
            self._redraw = None
            yield held
        yield from self._last()

    @staticmethod
    def _split_open(text: bytes) -> list[bytes]:
        # A trailing "\r" may be the first half of "\r\n", so it stays with the open line.
        if text.endswith(b"\r"):
            *parts, last = text[:-1].split(b"\r")
            return [*parts, last + b"\r"]
        return text.split(b"\r")

    def _redrawn(self, lines: list[bytes]) -> Iterable[bytes]:
        for line in lines:
            if not line:
                continue
            self._redraw = line
            if self._clock() - self._last_redraw >= REDRAW_S:
                self._last_redraw = self._clock()
                yield from self._last()

    def _last(self) -> Iterable[bytes]:
        if self._redraw is not None:
            line, self._redraw = self._redraw, None
            yield line


class Console:
    """A sink that prints to this process's standard output and error.

    Args:
        out: binary standard output; taken from `sys` by default.
        err: binary standard error; taken from `sys` by default.
    """

    def __init__(self, out: BinaryIO | None = None, err: BinaryIO | None = None) -> None:
        self._files = {1: out or sys.stdout.buffer, 2: err or sys.stderr.buffer}
        self._colour = {stream: _is_terminal(file) for stream, file in self._files.items()}

    def line(self, cluster: int, name: str, stream: int, text: bytes) -> None:
        """Prints one line with its prefix; coloured by cluster if the target is a terminal."""
        prefix = f"[{name}]".encode()
        if self._colour[stream]:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[cluster % len(_COLOURS)], prefix)
        # One write per line, so that lines of several writers to one terminal stay whole.
        self._files[stream].write(prefix + b" " + text + b"\n")

    def flush(self) -> None:
        """Passes everything on."""
        for file in self._files.values():
            file.flush()


def _is_terminal(file: BinaryIO) -> bool:
    return file.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
