"""Values of settings, from text or from Python. Pure; what is wrong with a value is a ValueError that says so."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}\Z")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# The member index travels as u32 and each member holds a connection to every other one.
_MAX_PROCESSES = 65536


def parse_coordinator(value: Any) -> tuple[str, int]:
    """Parses `host:port`, `[ipv6]:port` or a `(host, port)` pair."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        host, port = value
    else:
        match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]+)):(\d+)", str(value).strip())
        if not match:
            raise ValueError("expected host:port or [ipv6]:port")
        host, port = match[1] or match[2], match[3]
    if not 0 < int(port) < 65536:
        raise ValueError("the port must be between 1 and 65535")
    if host in ("0.0.0.0", "::", "*"):
        raise ValueError("expected an address that every member can connect to, not a wildcard")
    return str(host), int(port)


def parse_clusters(value: Any) -> tuple[tuple[str, int], ...]:
    """Parses `left:1,right:2`, `{"left": 1, "right": 2}` or `[("left", 1), ...]`."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        pairs = []
        for part in filter(None, (p.strip() for p in value.split(","))):
            name, colon, count = part.partition(":")
            pairs.append((name.strip(), count.strip() if colon else "1"))
    else:
        pairs = [(item, 1) if isinstance(item, str) else tuple(item) for item in value]
    clusters = []
    for name, count in pairs:
        if not _NAME.match(str(name)):
            raise ValueError(f"cluster name {name!r}: letters, digits, _ . - and at most 32 of them")
        if not str(count).isdigit() or not 0 < int(count) <= _MAX_PROCESSES:
            raise ValueError(f"cluster {name}: the number of processes must be a positive integer, not {count!r}")
        clusters.append((str(name), int(count)))
    if not clusters:
        raise ValueError("expected name:processes,name:processes,…")
    names = [name for name, _ in clusters]
    if len(set(names)) != len(names):
        raise ValueError("every cluster needs a name of its own")
    return tuple(clusters)


def parse_subset(value: Any, clusters: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Some of a job's clusters, in the job's order, from `left,third`, `left:1,third:1`, `["left", "third"]` or a mapping.

    A number of processes may be left out.

    Example:
      >>> parse_subset("third,left:1", [("left", 1), ("right", 2), ("third", 1)])
      ('left', 'third')
    """
    if isinstance(value, Mapping):
        pairs = [(str(name), str(count)) for name, count in value.items()]
    else:
        parts = value.split(",") if isinstance(value, str) else list(value)
        words = [part if isinstance(part, str) else f"{part[0]}:{part[1]}" for part in parts]
        pairs = [
            (name.strip(), count.strip()) for name, _, count in (word.partition(":") for word in words if word.strip())
        ]
    known = dict(clusters)
    for name, count in pairs:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            raise ValueError(
                f"there is no cluster {name!r} in the job, which has {', '.join(known)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        if count and count != str(known[name]):
            raise ValueError(f"cluster {name} has {known[name]} process(es), not {count}")
    chosen = {name for name, _ in pairs}
    if not chosen:
        raise ValueError("expected the names of the clusters to go on with")
    return tuple(name for name, _ in clusters if name in chosen)


def parse_axes(value: Any) -> dict[str, int | None]:
    """Parses `data`, `data=8,expert`, `("data",)` or `{"data": 8, "expert": None}`."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        parts = value.split(",") if isinstance(value, str) else list(value)
        pairs = []
        for part in filter(None, (str(p).strip() for p in parts)):
            name, _, size = part.partition("=")
            pairs.append((name.strip(), size.strip() or None))
    axes: dict[str, int | None] = {}
    for name, size in pairs:
        if not isinstance(name, str) or not _AXIS.match(name):
            raise ValueError(f"{name!r} is no axis name")
        if name in axes:
            raise ValueError(f"axis {name!r} is listed twice")
        if size is not None and (not str(size).isdigit() or int(size) < 1):
            raise ValueError(f"axis {name}: the size must be a positive integer, not {size!r}")
        axes[name] = None if size is None else int(size)
    return axes


def parse_port_range(value: Any) -> tuple[int, int]:
    """Parses `low-high` (inclusive) or a pair."""
    match = re.fullmatch(r"(\d+)-(\d+)", value if isinstance(value, str) else "{}-{}".format(*value))
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < low <= high < 65536:
        raise ValueError("expected low-high with 1 <= low <= high <= 65535")
    return low, high


def index(value: Any) -> int:
    if not str(value).isdigit():
        raise ValueError("expected 0, 1, 2, …")
    return int(value)


def positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError("expected a positive number")
    return number


def not_negative(value: Any) -> float:
    return 0.0 if float(value) == 0 else positive(value)


def flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError("expected 1 or 0")
    return text in ("1", "true", "yes")


def one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1)
            raise ValueError(f"expected one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else ""))
        return value

    return parse


def between(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not str(value).isdigit() or not low <= int(value) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(value)

    return parse


def automatic(parse: Callable[[Any], int]) -> Callable[[Any], int | None]:
    """Like `parse`, with -1 for None: chosen automatically."""
    return lambda value: None if str(value) == "-1" else parse(value)
