"""What the user asks to be started: `left=1x2@cpu`. Pure but for one look at a file."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence

from jax_hetccl._errors import ConfigError

PLATFORMS = ("cpu", "cuda", "rocm")
FORM = "NAME=PROCESSESxDEVICES[@PLATFORM]"
_CLUSTER = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,31})=(?P<processes>\d+)x(?P<devices>\d+)(@(?P<platform>.*))?")


class LaunchError(ConfigError):
    """A wrong argument of the launcher; the message lists what is valid."""


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """One cluster to start: its name, how many processes, and the devices each of them sees.

    Attributes:
        name: as shown in output prefixes and in `HETCCL_CLUSTERS`.
        processes: processes of this cluster, at least one.
        devices: devices per process, at least one.
        platform: one of `PLATFORMS`.
    """

    name: str
    processes: int
    devices: int
    platform: str = "cpu"


def default_platform(environ: Mapping[str, str]) -> str:
    """The platform of a cluster given without `@PLATFORM`: the first one in `JAX_PLATFORMS`, or `cpu`."""
    first = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    first = {"gpu": "cuda"}.get(first, first)
    return first if first in PLATFORMS else "cpu"


def parse_cluster(text: str, platform: str = "cpu") -> ClusterSpec:
    """Reads one `--cluster` value.

    Args:
        text: `NAME=PROCESSESxDEVICES[@PLATFORM]`, e.g. `left=2x1@cpu`.
        platform: taken when the text names none.

    Returns:
        The cluster.

    Raises:
        LaunchError: the text has another form; the message shows the valid one.

    Example:
        >>> parse_cluster("right=2x4@cuda")
        ClusterSpec(name='right', processes=2, devices=4, platform='cuda')
    """
    match = _CLUSTER.fullmatch(text.strip())
    problem = None
    if match is None:
        problem = "it does not have this form"
    elif int(match["processes"]) < 1 or int(match["devices"]) < 1:
        problem = "a cluster has at least 1 process and 1 device in each"
    elif match["platform"] is not None and match["platform"] not in PLATFORMS:
        problem = f"unknown platform {match['platform']!r}"
    if match is None or problem:
        raise LaunchError(
            f"--cluster {text!r}: {problem}; valid: {FORM} with NAME of up to 32 letters, digits, '_', '-', "
            f"'.', starting with a letter, and PLATFORM one of {', '.join(PLATFORMS)}, e.g. "
            "--cluster left=1x2 --cluster right=2x1@cpu"
        )
    return ClusterSpec(match["name"], int(match["processes"]), int(match["devices"]), match["platform"] or platform)


def parse_clusters(texts: Sequence[str], platform: str = "cpu") -> tuple[ClusterSpec, ...]:
    """Reads all `--cluster` values, in rank order; see `parse_cluster`.

    Raises:
        LaunchError: one has a wrong form, two have the same name, or there is none.
    """
    clusters = tuple(parse_cluster(text, platform) for text in texts)
    if not clusters:
        raise LaunchError(f"no cluster given; valid: --cluster {FORM}, once per cluster in rank order")
    names = [cluster.name for cluster in clusters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaunchError(f"cluster name given twice: {', '.join(twice)}; every --cluster needs its own name")
    return clusters


def parse_pythons(texts: Sequence[str], clusters: Sequence[ClusterSpec]) -> dict[str, str]:
    """Reads `--python CLUSTER=PATH` values.

    Args:
        texts: the values given.
        clusters: the clusters they may name.

    Returns:
        The absolute path of an interpreter, for each cluster named.

    Raises:
        LaunchError: wrong form, unknown or repeated cluster, or no executable file there.
    """
    names = [cluster.name for cluster in clusters]
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path or name not in names or name in found:
            reason = "given twice" if name in found else "valid: --python CLUSTER=PATH"
            raise LaunchError(f"--python {text!r}: {reason} with CLUSTER one of {', '.join(names)}")
        executable = shutil.which(os.path.expanduser(path))
        if executable is None:
            raise LaunchError(f"--python {text!r}: {path!r} is not an executable file; give a Python's path")
        # Not resolved: a virtual environment's python is a link that must be called by its own name.
        found[name] = os.path.abspath(executable)
    return found
