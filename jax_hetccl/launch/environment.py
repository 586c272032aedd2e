"""Which environment and command each process gets. Pure: the inherited environment is an argument."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jax_hetccl.launch.spec import ClusterSpec, LaunchError

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
_PYTHON_WORDS = ("python", "python3")
# Inherited ones that would contradict what the launcher sets.
_DROPPED = ("HETCCL_SECRET_FILE", "HETCCL_COORDINATOR_EXTERNAL")


@dataclasses.dataclass(frozen=True)
class ProcessPlan:
    """One process to start.

    Attributes:
        cluster: index of its cluster, `-1` for a process outside any cluster.
        name: `left/0`, the prefix of its output.
        command: argument vector; the first word is a program.
        environ: its whole environment.
    """

    cluster: int
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]


def host_device_flags(flags: str, devices: int) -> str:
    """`XLA_FLAGS` with the host device count set, other flags kept."""
    kept = [flag for flag in flags.split() if flag.partition("=")[0] != _DEVICE_COUNT]
    return " ".join([*kept, f"{_DEVICE_COUNT}={devices}"])


def platform_environ(environ: Mapping[str, str], platform: str, devices: int, first: int) -> dict[str, str]:
    """Variables that make a process see exactly its devices.

    Args:
        environ: the inherited environment (`XLA_FLAGS` and visible devices are read).
        platform: `cpu`, `cuda` or `rocm`.
        devices: how many devices the process gets.
        first: devices of this platform that earlier processes took.

    Raises:
        LaunchError: the inherited visible devices are fewer than asked for.
    """
    if platform == "cpu":
        flags = host_device_flags(environ.get("XLA_FLAGS", ""), devices)
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    variable = _VISIBLE[platform]
    wanted = [str(first + index) for index in range(devices)]
    if environ.get(variable):
        visible = [word.strip() for word in environ[variable].split(",")]
        wanted = visible[first : first + devices]
        if len(wanted) < devices:
            raise LaunchError(
                f"{variable}={environ[variable]} shows {len(visible)} devices, but the clusters on "
                f"{platform} ask for at least {first + devices}; ask for fewer (PROCESSESxDEVICES) or show "
                "more"
            )
    # The CPU stays available behind the accelerator: programs put host arrays there.
    return {"JAX_PLATFORMS": f"{platform},cpu", variable: ",".join(wanted)}


def _command(command: Sequence[str], cluster: str, pythons: Mapping[str, str], python: str) -> tuple[str, ...]:
    if command[0] in _PYTHON_WORDS:
        return (pythons.get(cluster, python), *command[1:])
    if cluster in pythons:
        raise LaunchError(
            f"--python {cluster}={pythons[cluster]} replaces the word 'python' at the start of the command, "
            f"but the command starts with {command[0]!r}; write: -- python PROGRAM ..."
        )
    return tuple(command)


def plan_processes(
    clusters: Sequence[ClusterSpec],
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    coordinator: str,
    secret: str,
    python: str,
    pythons: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[ProcessPlan]:
    """Plans every process of every cluster.

    Args:
        clusters: in rank order.
        command: what each process runs; `python` as its first word becomes the cluster's interpreter.
        environ: the inherited environment.
        coordinator: `host:port` where the first process will answer.
        secret: the job's secret.
        python: the interpreter of clusters that are not in `pythons`.
        pythons: cluster name to interpreter.
        settings: further `HETCCL_*` variables, e.g. the transport.

    Returns:
        One plan per process, clusters in order.

    Raises:
        LaunchError: no command, `--python` with a command that is not Python, or too few visible devices.

    Example:
        >>> plan_processes([ClusterSpec("left", 1, 2)], ["python", "t.py"], environ={}, secret="s",
        ...                coordinator="127.0.0.1:9", python="/usr/bin/python3")[0].command
        ('/usr/bin/python3', 't.py')
    """
    if not command:
        raise LaunchError("no command given; valid: hetccl run --cluster ... -- python PROGRAM [ARGUMENTS]")
    base = {key: value for key, value in environ.items() if key not in _DROPPED}
    base.update(settings or {})
    base.setdefault("PYTHONUNBUFFERED", "1")  # else prefixed lines come late and out of order
    base["HETCCL_COORDINATOR"] = coordinator
    base["HETCCL_SECRET"] = secret
    base["HETCCL_CLUSTERS"] = ",".join(f"{cluster.name}:{cluster.processes}" for cluster in clusters)
    taken = dict.fromkeys(_VISIBLE, 0)
    plans: list[ProcessPlan] = []
    for index, cluster in enumerate(clusters):
        words = _command(command, cluster.name, pythons or {}, python)
        for process in range(cluster.processes):
            own = {"HETCCL_CLUSTER": cluster.name, "HETCCL_PROCESS": str(process)}
            first = taken.get(cluster.platform, 0)
            own.update(platform_environ(environ, cluster.platform, cluster.devices, first))
            if cluster.platform in taken:
                taken[cluster.platform] += cluster.devices
            plans.append(ProcessPlan(index, f"{cluster.name}/{process}", words, {**base, **own}))
    return plans


def redact(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables worth showing a user, without the secret."""
    shown = {key: value for key, value in environ.items() if re.match(r"HETCCL_|JAX_PLATFORMS|XLA_FLAGS", key)}
    return {key: "***" if key == "HETCCL_SECRET" else value for key, value in shown.items()}
