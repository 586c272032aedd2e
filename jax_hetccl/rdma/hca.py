"""Which ports RDMA may use: the syntax of NCCL_IB_HCA. Pure."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

_ENTRY = re.compile(r"([A-Za-z0-9_.-]+)(?::(\d+))?\Z")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a list.

    Attributes:
      device: a device's name, or how it begins.
      port: a number, or None for every port.
      exact: whether `device` is the whole name.
      exclude: whether the entry takes ports away.
    """

    device: str
    port: int | None
    exact: bool
    exclude: bool

    def matches(self, device: str, port: int) -> bool:
        """Whether the entry speaks of this port."""
        hit = device == self.device if self.exact else device.startswith(self.device)
        return hit and self.port in (None, port)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A parsed list. `str` gives the text it was made from."""

    text: str
    entries: tuple[Entry, ...]

    def allows(self, device: str, port: int) -> bool:
        """Whether port `port` of `device` may be used."""
        wanted = [entry for entry in self.entries if not entry.exclude]
        if any(entry.matches(device, port) for entry in self.entries if entry.exclude):
            return False
        return not wanted or any(entry.matches(device, port) for entry in wanted)

    def __str__(self) -> str:
        return self.text


def parse(value: Any) -> Selection:
    """Parses a list of ports in NCCL's syntax.

    `mlx5` selects devices by prefix, `=mlx5_0:1,mlx5_1` exactly and, with `:`, by port; `^mlx5_3,mlx5_4` takes all but
    these and `^=mlx5_1` all but exactly this one. As in NCCL, `^` and `=` before the first entry hold for the whole
    list. Beyond NCCL, they may also stand before a later entry and then hold for that one: `mlx5,^mlx5_3`.

    Raises:
      ValueError: it is not such a list.

    Example:
      >>> parse("=mlx5_1:2").allows("mlx5_1", 2), parse("mlx5_1").allows("mlx5_10", 1), parse("^mlx5").allows("rxe0", 1)
      (True, True, True)
    """
    text = str(value).strip()
    exclude_all, exact_all, rest = _signs(text)
    entries = []
    for part in rest.split(","):
        exclude, exact, name = _signs(part.strip())
        match = _ENTRY.match(name)
        if not match:
            raise ValueError(f"{part!r}: expected a list such as mlx5_0:1,mlx5_1 or =mlx5_0 or ^mlx5_3")
        port = None if match[2] is None else int(match[2])
        if port == 0:
            raise ValueError(f"{part!r}: ports are counted from 1")
        entries.append(Entry(match[1], port, exact or exact_all, exclude or exclude_all))
    return Selection(text, tuple(entries))


def _signs(text: str) -> tuple[bool, bool, str]:
    exclude = text.startswith("^")
    text = text[exclude:]
    exact = text.startswith("=")
    return exclude, exact, text[exact:]
