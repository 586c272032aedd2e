"""A sink that keeps each process's lines in a file of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class LogFiles:
    """Writes to `FOLDER/left-0.log` and so on, standard output and error together; see `output.Sink`.

    Only the user may read them: nobody knows what a program writes.

    Args:
        folder: must exist; logs of an earlier run with the same names are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}

    def path(self, name: str) -> Path:
        """The log of a process, `left/0` for example."""
        return self._folder / f"{name.replace('/', '-')}.log"

    def line(self, cluster: int, name: str, stream: int, text: bytes) -> None:
        """Writes one line."""
        if name not in self._files:
            self._files[name] = _private(self.path(name))
        self._files[name].write(text + b"\n")

    def flush(self) -> None:
        """Passes everything on to the files."""
        for file in self._files.values():
            file.flush()

    def tail(self, name: str, lines: int = 30) -> str:
        """The last lines of a process, empty if it wrote none."""
        try:
            return "\n".join(self.path(name).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """Closes the files; writing again starts them anew."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _private(path: Path) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    os.fchmod(file.fileno(), 0o600)  # it may be there already
    return file
