"""Settings: the only reader and writer of environment variables.

`resolve` merges arguments (which win) with the environment, validates everything and reports all
problems in one error. The resulting `Config` is immutable and is passed down; nothing below reads the
environment again.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from jax_hetccl import _values
from jax_hetccl._errors import ConfigError
from jax_hetccl._secret import check_strength, read_file
from jax_hetccl.rdma import choose, hca

TRANSPORTS = ("auto", "shm", "rdma", "tcp")
STREAM_SYNCS = ("auto", "memops", "hostfunc")
INTEGER_FAILURES = ("abort", "raise")
PREFIX = "HETCCL_"


@dataclasses.dataclass(frozen=True)
class Config:
    """Validated settings of one process. Build it with `resolve`.

    Attributes:
      coordinator: `(host, port)` where the members meet.
      clusters: `(name, processes)` of every cluster, in rank order.
      cluster: index of this process's cluster in `clusters`.
      process: index of this process in its cluster.
      secret: the job's secret or None (loopback only). Never shown by `repr`.
      axes: spanning axes and their global size, None where it is agreed at the first trace.
      timeout: seconds a transfer may make no progress.
      arrival_timeout: seconds a peer may take to reach the operation (it may still be compiling).
      join_timeout: seconds to wait for all members to join.
      transport: `"auto"`, `"shm"`, `"rdma"` or `"tcp"`.
      socket_ifname: network interfaces in NCCL's syntax, or None.
      ib_hca: which ports RDMA may use, in NCCL's syntax, or None for all.
      ib_gid_index: the GID that RDMA ports use, or None: chosen for each port.
      ib_tc: traffic class of RDMA packets.
      ib_timeout: an acknowledgement of RDMA may take 4.096 µs times 2 to this power.
      ib_retry_cnt: how often RDMA sends again without an acknowledgement.
      ib_odp: whether RDMA keeps registrations of buffers on ports with on-demand paging.
      port_range: inclusive `(low, high)` for every port this process listens on, or None.
      bucket_mb: size of a gradient bucket in MB.
      stream_sync: how a GPU's stream waits for the host: `"memops"` (stream memory operations), `"hostfunc"` (host
        functions) or `"auto"` (memops where every device has them).
      on_integer_failure: what happens on a GPU when an exchange of values that have no NaN fails: `"abort"` ends the
        process with the error, `"raise"` delivers zeros and raises the error at the next occasion.
      slot_kb: size of a staging slot in KB, or None for one that fits the platforms of a pair of ranks.
      slots: staging slots of each direction between two ranks, or None, likewise.
      checksum: whether what goes over tcp carries checksums.
      tls: whether what goes over tcp is encrypted, and nothing goes over rdma.
      keep_memory_mb: MB of freed memory that a process of CPU devices keeps for its next step; 0: the system's way.
      coordinator_external: True if nobody in this world may host the coordinator.
    """

    coordinator: tuple[str, int]
    clusters: tuple[tuple[str, int], ...]
    cluster: int
    process: int
    secret: str | None = dataclasses.field(default=None, repr=False)
    axes: dict[str, int | None] = dataclasses.field(default_factory=dict)
    timeout: float = 60.0
    arrival_timeout: float = 600.0
    join_timeout: float = 300.0
    transport: str = "auto"
    socket_ifname: str | None = None
    ib_hca: hca.Selection | None = None
    ib_gid_index: int | None = None
    ib_tc: int = 0
    ib_timeout: int = 20
    ib_retry_cnt: int = 7
    ib_odp: bool = False
    port_range: tuple[int, int] | None = None
    bucket_mb: float = 4.0
    stream_sync: str = "auto"
    on_integer_failure: str = "abort"
    slot_kb: int | None = None
    slots: int | None = None
    checksum: bool = False
    tls: bool = False
    keep_memory_mb: float = 1024.0
    coordinator_external: bool = False

    @property
    def cluster_name(self) -> str:
        """The name of this process's cluster."""
        return self.clusters[self.cluster][0]

    @property
    def member_name(self) -> str:
        """This process as `cluster/process`, such as `left/0`."""
        return f"{self.cluster_name}/{self.process}"

    @property
    def member_names(self) -> tuple[str, ...]:
        """All members in order: clusters in order, then processes."""
        return tuple(f"{name}/{p}" for name, count in self.clusters for p in range(count))

    @property
    def agree(self) -> dict[str, Any]:
        """What must be equal in all processes, by the names of the settings."""
        return {
            "HETCCL_BUCKET_MB": self.bucket_mb,
            "HETCCL_AXES": sorted(self.axes),
            "HETCCL_CHECKSUM": int(self.checksum),
            "HETCCL_TLS": int(self.tls),
        }

    @property
    def coordinator_text(self) -> str:
        """The coordinator as `host:port`, with brackets around an IPv6 address."""
        host, port = self.coordinator
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def loopback(self) -> bool:
        """True if the coordinator is a loopback address: then nothing listens beyond this host."""
        return is_loopback(self.coordinator[0])


def is_loopback(host: str) -> bool:
    """Returns whether `host` is written as a loopback address (`localhost`, 127.0.0.0/8, `::1`).

    A name is not looked up: many systems map their own host name to 127.0.1.1, which other machines
    cannot use and which must therefore not relax any rule.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class _Setting:
    name: str
    parse: Callable[[Any], Any]
    help: str

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()


_SETTINGS = (
    _Setting("coordinator", _values.parse_coordinator, "host:port where all processes meet"),
    _Setting("clusters", _values.parse_clusters, "name:processes,… in rank order, e.g. left:1,right:2"),
    _Setting("cluster", str, "this process's cluster, by name or index"),
    _Setting("process", _values.index, "this process's index in its cluster (default 0 if it has one process)"),
    _Setting("secret", str, "the job's secret, from `hetccl secret` (without: loopback only)"),
    _Setting("secret_file", str, "a file that holds the secret"),
    _Setting("timeout", _values.positive, "seconds a transfer may make no progress (default 60)"),
    _Setting("arrival_timeout", _values.positive, "seconds a peer may take to reach the operation (default 600)"),
    _Setting("join_timeout", _values.positive, "seconds to wait for all members (default 300)"),
    _Setting("transport", _values.one_of(TRANSPORTS), "auto, shm, rdma or tcp (default auto)"),
    _Setting("socket_ifname", str, "interfaces to use: eth0 | =eth0 | ^docker0 | eth,ib (default: by route)"),
    _Setting("ib_hca", hca.parse, "ports for RDMA: mlx5 | =mlx5_0:1,mlx5_1 | ^mlx5_3 (default: the nearest)"),
    _Setting("ib_gid_index", _values.automatic(_values.index), "GID of RDMA ports, -1: chosen (default -1)"),
    _Setting("ib_tc", _values.between(0, 255), "traffic class of RDMA packets, 0 to 255 (default 0)"),
    _Setting("ib_timeout", _values.between(1, 31), "RDMA: an acknowledgement may take 4.096 us * 2^this (default 20)"),
    _Setting("ib_retry_cnt", _values.between(0, 7), "RDMA: attempts after the first one, 0 to 7 (default 7)"),
    _Setting(
        "ib_odp", _values.flag, "1: RDMA keeps registrations of buffers, on ports with on-demand paging (default 0)"
    ),
    _Setting("axes", _values.parse_axes, "spanning axes: name or name=size, comma separated"),
    _Setting("port_range", _values.parse_port_range, "low-high for all listening ports (default: any)"),
    _Setting("bucket_mb", _values.positive, "size of a gradient bucket in MB (default 4)"),
    _Setting(
        "stream_sync", _values.one_of(STREAM_SYNCS), "auto, memops or hostfunc: how GPU streams wait (default auto)"
    ),
    _Setting(
        "on_integer_failure",
        _values.one_of(INTEGER_FAILURES),
        "abort or raise: a failed exchange of integers on a GPU (default abort)",
    ),
    _Setting(
        "slot_kb",
        _values.between(4, 1 << 16),
        "KB of a staging slot, 4 to 65536 (default 128; GPU and CPU 4096; two GPUs 8192)",
    ),
    _Setting(
        "slots",
        _values.between(2, 1024),
        "staging slots of each direction of a pair of ranks, 2 to 1024 (default 16; GPU and CPU 8; two GPUs 6)",
    ),
    _Setting("checksum", _values.flag, "1: a bit that flips on a tcp connection is an error; equal everywhere"),
    _Setting(
        "tls", _values.flag, "1: data between clusters is encrypted (TLS 1.3 over tcp, no rdma); equal everywhere"
    ),
    _Setting(
        "keep_memory_mb", _values.not_negative, "MB of freed memory that CPU clusters keep, 0: none (default 1024)"
    ),
    _Setting("coordinator_external", _values.flag, "1 if only `hetccl coordinator` may host the coordinator"),
)


def variables() -> dict[str, str]:
    """Returns every environment variable that jax_hetccl reads, with its one-line description."""
    return {setting.env: setting.help for setting in _SETTINGS}


def _listing() -> str:
    width = max(len(setting.env) for setting in _SETTINGS)
    lines = [f"  {setting.env:<{width}}  {setting.help}" for setting in _SETTINGS]
    return "Valid settings (environment, or the argument of the same name in lower case):\n" + "\n".join(lines)


def _gather(arguments: Mapping[str, Any], environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    known = {setting.name: setting for setting in _SETTINGS}
    for name in arguments:
        if name not in known:
            problems.append(f"{name}: no such argument{_near(name, known)}")
    envs = {setting.env for setting in _SETTINGS}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in envs:
            problems.append(f"{variable}: no such variable{_near(variable, envs)}")
    values: dict[str, Any] = {}
    for setting in _SETTINGS:
        value, source = arguments.get(setting.name), setting.name
        if value is None:
            value, source = environ.get(setting.env) or None, setting.env
        if value is None:
            continue
        try:
            values[setting.name] = setting.parse(value)
        except (TypeError, ValueError) as error:
            shown = "" if setting.name == "secret" else f"={value!r}"
            problems.append(f"{source}{shown}: {error}")
            values[setting.name] = _WRONG
    return values


def _near(name: str, choices: Any) -> str:
    close = difflib.get_close_matches(name, list(choices), 1)
    return f"; did you mean {close[0]}?" if close else ""


_WRONG = object()  # given but unusable: already reported, so not reported as missing as well


def _resolve_place(values: dict[str, Any], problems: list[str]) -> None:
    """Turns the cluster's name into an index and checks the process's index."""
    clusters, cluster = values.get("clusters"), values.get("cluster")
    if clusters is None or clusters is _WRONG or cluster is None:
        return
    names = [name for name, _ in clusters]
    if cluster in names:
        values["cluster"] = index = names.index(cluster)
    elif cluster.isdigit() and int(cluster) < len(names):
        values["cluster"] = index = int(cluster)
    else:
        problems.append(f"cluster={cluster!r}: not one of the clusters {', '.join(names)}{_near(cluster, names)}")
        values["cluster"] = _WRONG
        return
    count = clusters[index][1]
    if values.get("process") is None and count == 1:
        values["process"] = 0
    process = values.get("process")
    if isinstance(process, int) and process >= count:
        problems.append(f"process={process}: cluster {names[index]} has processes 0 to {count - 1}")


def _resolve_secret(values: dict[str, Any], problems: list[str]) -> None:
    path, given = values.pop("secret_file", None), values.get("secret")
    if path is not None and path is not _WRONG:
        if given is not None:
            problems.append("secret and secret_file: give one of the two")
            return
        try:
            given = values["secret"] = read_file(path)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"secret_file={path!r}: cannot be read ({getattr(error, 'strerror', None) or error})")
            values["secret"] = _WRONG
            return
    if isinstance(given, str):
        try:
            check_strength(given)
        except ValueError as error:
            problems.append(f"secret: {error}")
    elif given is None:
        coordinator = values.get("coordinator")
        if isinstance(coordinator, tuple) and not is_loopback(coordinator[0]):
            problems.append(
                f"secret: needed, because the coordinator {coordinator[0]} is not a loopback address;"
                " make one with `hetccl secret` and give it to every process"
            )


def resolve(environ: Mapping[str, str] | None = None, *, member: bool = True, **arguments: Any) -> Config:
    """Merges arguments and environment into a validated `Config`.

    Args:
      environ: the environment, `os.environ` by default.
      member: False for a process that only hosts the coordinator: it has no cluster of its own.
      **arguments: any setting by its lower-case name; None means not given. An argument wins over the
        environment.

    Returns:
      The validated settings.

    Raises:
      ConfigError: lists every problem and all valid settings.

    Example:
      >>> config = resolve({}, coordinator="localhost:7000", clusters="left:1,right:1", cluster="right")
      >>> config.member_name
      'right/0'
    """
    problems: list[str] = []
    environ = os.environ if environ is None else environ
    values = _gather(arguments, environ, problems)
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        values.setdefault("keep_memory_mb", 0.0)  # the user has set the C library up
    _resolve_place(values, problems)
    _resolve_secret(values, problems)
    if values.get("tls") and values.get("transport") == "rdma":
        problems.append(f"HETCCL_TRANSPORT=rdma with {choose.NOT_ENCRYPTED}; use auto or tcp")
    if not member:
        values["cluster"], values["process"] = 0, 0
    for setting in _SETTINGS[:4]:
        if values.get(setting.name) is None:
            problems.append(f"{setting.env} is missing: {setting.help}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"jax_hetccl cannot start: {count} with the settings\n{listed}\n{_listing()}")
    return Config(**values)


def lookup(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings of the environment outside of a world, for commands that look at a machine.

    Args:
      *names: which ones, in lower case.
      environ: the environment, `os.environ` by default.

    Returns:
      The values of those that are set.

    Raises:
      ConfigError: one of them is wrong.
    """
    problems: list[str] = []
    environ = os.environ if environ is None else environ
    asked = {PREFIX + name.upper() for name in names}
    values = _gather({}, {variable: text for variable, text in environ.items() if variable in asked}, problems)
    if problems:
        raise ConfigError("wrong settings\n" + "\n".join(f"  - {problem}" for problem in problems))
    return values


@dataclasses.dataclass(frozen=True)
class Queues:
    """How a vendor's driver is told on how many hardware queues it spreads a process's streams.

    A stream that waits holds up all that share its queue. XLA's streams wait for the one that an exchange holds, and the
    copies that would release it must not stand behind them.

    Attributes:
      variable: read by the driver when it starts.
      enough: the value that is set where the user has set none.
    """

    variable: str
    enough: int

    def found(self, environ: Mapping[str, str] | None = None) -> int | None:
        """The value in force, None if there is none or it is no number."""
        value = (os.environ if environ is None else environ).get(self.variable, "").strip()
        return int(value) if value.isdigit() else None


# CUDA's default is 8, of which a client of MPS gets fewer; HIP's is 4, and more than 8 cost latency.
QUEUES = {"cuda": Queues("CUDA_DEVICE_MAX_CONNECTIONS", 32), "rocm": Queues("GPU_MAX_HW_QUEUES", 8)}


def ask_for_queues(started: bool, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Sets the variables in ``QUEUES`` that the user has not set; drivers that start later follow them.

    Args:
      started: JAX's devices are in use already, so that it is too late.
      environ: the environment, `os.environ` by default.

    Returns:
      By platform, why exchanges on its devices may get stuck; platforms without a problem are left out.
    """
    environ = os.environ if environ is None else environ
    problems = {}
    for platform, queues in QUEUES.items():
        consequence = (
            "copies between clusters may get stuck behind streams that wait for them, until HETCCL_TIMEOUT; set "
            f"{queues.variable}={queues.enough} before JAX starts"
        )
        found = queues.found(environ)
        if queues.variable in environ:
            if found is None or found < queues.enough:
                problems[platform] = f"{queues.variable}={environ[queues.variable]}: {consequence}"
        elif started:
            problems[platform] = (
                f"JAX's devices were in use before hetccl.initialize(), and {queues.variable} was not set: {consequence}, "
                "or call initialize() before anything else that uses JAX devices"
            )
        else:
            environ[queues.variable] = str(queues.enough)
    return problems


def growing_memory(environ: Mapping[str, str] | None = None) -> str | None:
    """Why a GPU's memory may grow while programs run, which waits for exchanges and may keep them waiting.

    Args:
      environ: the environment, `os.environ` by default.

    Returns:
      None if JAX takes its part of the memory at once.
    """
    environ = os.environ if environ is None else environ
    for variable, growing in (
        ("XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "0")),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", ("platform",)),
    ):
        if (found := environ.get(variable, "")).lower() in growing:
            return (
                f"{variable}={found}: a driver that allocates memory behind an exchange may wait for it and keep it from "
                "ending, until HETCCL_TIMEOUT; let JAX take its memory at once and limit it with "
                "XLA_PYTHON_CLIENT_MEM_FRACTION instead"
            )
    return None


def expand_sequence(value: str | Sequence[str]) -> tuple[str, ...]:
    """Splits a comma list into its non-empty parts."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())
