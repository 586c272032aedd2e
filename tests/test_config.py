"""Settings: arguments over environment, one error for all problems, and secrets that stay secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl import _config, _secret, _values
from jax_hetccl._config import resolve
from jax_hetccl._errors import ConfigError, HetcclError, PeerLostError, error_from
from jax_hetccl.connect import staging

GOOD = {
    "HETCCL_COORDINATOR": "localhost:7000",
    "HETCCL_CLUSTERS": "left:2,right:1",
    "HETCCL_CLUSTER": "left",
    "HETCCL_PROCESS": "1",
}


def problems(environ: dict[str, str] | None = None, **arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({} if environ is None else environ, **arguments)
    return str(caught.value)


def test_environment_alone_is_enough():
    config = resolve(GOOD)
    assert config.coordinator == ("localhost", 7000)
    assert config.clusters == (("left", 2), ("right", 1))
    assert (config.cluster, config.process, config.member_name) == (0, 1, "left/1")
    assert config.member_names == ("left/0", "left/1", "right/0")
    assert (config.timeout, config.arrival_timeout, config.join_timeout) == (60, 600, 300)
    assert config.transport == "auto" and config.secret is None and config.loopback


def test_arguments_win_over_the_environment():
    config = resolve(GOOD, cluster="right", process=0, timeout=5, axes={"data": 8, "expert": None})
    assert config.member_name == "right/0" and config.timeout == 5
    assert config.axes == {"data": 8, "expert": None}


def test_freed_memory_is_left_alone_where_the_user_has_set_up_the_c_library():
    assert resolve(GOOD).keep_memory_mb == 1024
    assert resolve({**GOOD, "MALLOC_ARENA_MAX": "2"}).keep_memory_mb == 0
    assert resolve({**GOOD, "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, keep_memory_mb=8).keep_memory_mb == 8


def test_process_defaults_to_0_only_in_a_cluster_of_one():
    environ = {k: v for k, v in GOOD.items() if k != "HETCCL_PROCESS"}
    assert resolve(environ, cluster="right").process == 0
    assert "HETCCL_PROCESS is missing" in problems(environ)


def test_empty_variables_count_as_unset():
    assert resolve({**GOOD, "HETCCL_TRANSPORT": "", "HETCCL_SECRET": ""}).transport == "auto"


def test_all_problems_come_in_one_error_with_all_valid_settings():
    text = problems({"HETCCL_TRANSPORT": "smh", "HETCCL_TIMEOUT": "-3", "HETCCL_COORDINATR": "localhost:7000"})
    assert "7 problems" in text
    for part in (
        "did you mean shm?",
        "HETCCL_TIMEOUT='-3': expected a positive number",
        "HETCCL_COORDINATR: no such variable; did you mean HETCCL_COORDINATOR?",
        "HETCCL_COORDINATOR is missing",
        "HETCCL_CLUSTERS is missing",
        "HETCCL_CLUSTER is missing",
        "HETCCL_PROCESS is missing",
    ):
        assert part in text
    for variable in _config.variables():
        assert f"  {variable} " in text


def test_unknown_argument_names_the_nearest():
    assert "timeot: no such argument; did you mean timeout?" in problems(GOOD, timeot=3)


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("coordinator", "localhost", "expected host:port"),
        ("coordinator", "localhost:0", "between 1 and 65535"),
        ("coordinator", "::1:7000", "expected host:port"),
        ("coordinator", "0.0.0.0:7000", "not a wildcard"),
        ("clusters", "left:0", "positive integer"),
        ("clusters", "left,left", "a name of its own"),
        ("clusters", "le/ft:1", "cluster name"),
        ("clusters", ",", "expected name:processes"),
        ("cluster", "rigth", "did you mean right?"),
        ("cluster", "2", "not one of the clusters"),
        ("process", "2", "left has processes 0 to 1"),
        ("process", "-1", "expected 0, 1, 2"),
        ("axes", "data=0", "positive integer"),
        ("axes", "data,data", "listed twice"),
        ("axes", "1x", "no axis name"),
        ("port_range", "9-1", "low <= high"),
        ("port_range", "abc", "expected low-high"),
        ("timeout", "inf", "positive number"),
        ("keep_memory_mb", "-1", "positive number"),
        ("coordinator_external", "perhaps", "expected 1 or 0"),
        ("stream_sync", "memop", "expected one of auto, memops, hostfunc; did you mean memops?"),
        ("on_integer_failure", "ignore", "expected one of abort, raise"),
        ("slot_kb", "3", "from 4 to 65536"),
        ("slots", "1.5", "from 2 to 1024"),
        ("secret_file", "/nonexistent/secret", "No such file"),
    ],
)
def test_wrong_values_say_why(setting, value, why):
    text = problems({**GOOD, "HETCCL_" + setting.upper(): value})
    assert why in text and "1 problem " in text


def test_python_values():
    config = resolve(
        {},
        coordinator=("::1", 7000),
        clusters={"a": 1, "b": 3},
        cluster="1",
        process=2,
        port_range=(5000, 5010),
    )
    assert config.coordinator_text == "[::1]:7000" and config.loopback
    assert config.member_name == "b/2" and config.port_range == (5000, 5010)
    assert resolve(GOOD, axes=("data", "expert")).axes == {"data": None, "expert": None}
    assert resolve(GOOD, axes="data=8,expert").axes == {"data": 8, "expert": None}


@given(st.dictionaries(st.from_regex(r"\A[A-Za-z][A-Za-z0-9_.-]{0,31}\Z"), st.integers(1, 65536), min_size=1))
def test_clusters_survive_writing_and_reading(clusters):
    text = ",".join(f"{name}:{count}" for name, count in clusters.items())
    assert _values.parse_clusters(text) == tuple(clusters.items()) == _values.parse_clusters(clusters)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.5", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("vm", False),
        ("::2", False),
    ],
)
def test_loopback_is_what_is_written_not_what_is_looked_up(host, loopback):
    assert _config.is_loopback(host) == loopback


def test_beyond_loopback_a_secret_is_needed():
    environ = {**GOOD, "HETCCL_COORDINATOR": "10.0.0.1:7000"}
    assert "secret: needed" in problems(environ)
    assert resolve(environ, secret=_secret.generate()).secret


def test_secret_file(tmp_path):
    path = tmp_path / "secret"
    secret = _secret.generate()
    path.write_text(secret + "\n")
    assert resolve(GOOD, secret_file=str(path)).secret == secret
    assert "give one of the two" in problems(GOOD, secret_file=str(path), secret=secret)


@pytest.mark.parametrize(
    "weak",
    ["hunter2", "a" * 64, "0123456789abcdef", "correct-horse-battery-staple-correct-horse", "pass word " * 5],
)
def test_weak_secrets_are_refused_and_never_shown(weak):
    text = problems(GOOD, secret=weak)
    assert "hetccl secret" in text and weak not in text


def test_secrets_are_never_shown():
    secret = _secret.generate()
    config = resolve(GOOD, secret=secret)
    assert secret not in repr(config)
    assert secret not in problems(GOOD, secret=secret, timeout=-1)


def test_generated_secrets_are_strong_and_differ():
    made = {_secret.generate() for _ in range(100)}
    assert len(made) == 100
    for secret in made:
        _secret.check_strength(secret)
    _secret.check_strength("9f86d081884c7d659a2feaa0c55ad015")  # openssl rand -hex 16


def test_coordinator_alone_needs_no_cluster():
    config = resolve({}, member=False, coordinator="localhost:7000", clusters="left:2,right:1")
    assert config.member_names == ("left/0", "left/1", "right/0")


def test_failure_kinds_become_exceptions():
    assert type(error_from("peer_lost", "x")) is PeerLostError
    assert type(error_from("something new", "x")) is HetcclError and str(error_from("corrupt", "y")) == "y"


def test_settings_of_gpus_and_staging():
    config = resolve(GOOD)
    assert (config.stream_sync, config.on_integer_failure, config.slot_kb, config.slots) == (
        "auto",
        "abort",
        None,
        None,
    )
    config = resolve(
        {**GOOD, "HETCCL_STREAM_SYNC": "hostfunc", "HETCCL_SLOT_KB": "64"}, on_integer_failure="raise", slots=8
    )
    assert (config.stream_sync, config.on_integer_failure) == ("hostfunc", "raise")
    assert staging(config, ("cpu", "cuda")) == (64 << 10, 8)


def test_a_gpu_gets_large_slots():
    config = resolve(GOOD)
    assert staging(config, ("cpu", "cpu")) == (128 << 10, 16)
    assert staging(config, ("cpu", "cuda")) == (4 << 20, 8)
    assert staging(config, ("rocm", "cuda")) == (8 << 20, 6)


def test_hardware_queues_are_asked_for_in_time():
    environ: dict[str, str] = {}
    assert _config.ask_for_queues(started=False, environ=environ) == {}
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "GPU_MAX_HW_QUEUES": "8"}
    assert _config.ask_for_queues(started=True, environ=environ) == {}, "a second world of the process"


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_hardware_queues_that_the_user_chose_stay(value):
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": value, "GPU_MAX_HW_QUEUES": "16"}
    found = _config.ask_for_queues(started=False, environ=environ)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == value
    assert set(found) == {"cuda"} and f"CUDA_DEVICE_MAX_CONNECTIONS={value}: copies" in found["cuda"]


def test_memory_that_grows_is_a_problem():
    assert _config.growing_memory({}) is None
    assert _config.growing_memory({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}) is None
    for variable, value in (("PREALLOCATE", "false"), ("ALLOCATOR", "platform")):
        found = _config.growing_memory({f"XLA_PYTHON_CLIENT_{variable}": value})
        assert found and f"XLA_PYTHON_CLIENT_{variable}={value}: " in found


def test_hardware_queues_asked_for_too_late_are_a_problem():
    environ: dict[str, str] = {}
    found = _config.ask_for_queues(started=True, environ=environ)
    assert not environ and set(found) == {"cuda", "rocm"}
    assert "GPU_MAX_HW_QUEUES=8" in found["rocm"] and "before hetccl.initialize()" in found["rocm"]
