"""The launcher, with small programs that do not use JAX."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_hetccl
from jax_hetccl.launch import ClusterSpec, LaunchError, parse_clusters, parse_pythons, plan_processes
from jax_hetccl.launch.environment import host_device_flags, platform_environ, redact
from jax_hetccl.launch.output import MAX_LINE, LineSplitter
from jax_hetccl.launch.spec import default_platform, parse_cluster

# Where the package under test is: installed, or the source tree. A fresh clone has no built module in the latter.
_ROOT = str(Path(jax_hetccl.__file__).resolve().parents[1])
_TWO = ("--cluster", "left=1x2", "--cluster", "right=2x1@cpu")


def _environ() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HETCCL_")}
    path = os.pathsep.join(filter(None, [_ROOT, environ.get("PYTHONPATH")]))
    return {**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _command(program: str, *options: str, clusters: tuple[str, ...] = _TWO) -> list[str]:
    run = [sys.executable, "-m", "jax_hetccl.cli", "run", *clusters, *options]
    return [*run, "--", "python", "-c", "import os, signal, sys, time\n" + program]


def _run(program: str, *options: str, clusters: tuple[str, ...] = _TWO) -> subprocess.CompletedProcess[str]:
    command = _command(program, *options, clusters=clusters)
    return subprocess.run(command, env=_environ(), capture_output=True, check=False, text=True, timeout=60)


@contextlib.contextmanager
def _started(program: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = _command(program, *options)
    with subprocess.Popen(
        command, env=_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().split("] ", 1)[1].strip() for _ in range(count)]


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _all_gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(_alive, pids))


# --- pure parts ------------------------------------------------------------------------------------


def test_cluster_forms() -> None:
    assert parse_clusters(["left=1x2", "right=2x1@rocm"]) == (
        ClusterSpec("left", 1, 2, "cpu"),
        ClusterSpec("right", 2, 1, "rocm"),
    )
    assert parse_cluster("a=1x1", platform="cuda").platform == "cuda"


@pytest.mark.parametrize("text", ["left", "left=2", "left=x2", "=1x1", "1x1", "l=0x1", "l=1x0", "l=1x1@tpu", "l=1x1@"])
def test_wrong_cluster_shows_the_valid_form(text: str) -> None:
    with pytest.raises(LaunchError, match=r"valid: NAME=PROCESSESxDEVICES\[@PLATFORM\].*cpu, cuda, rocm"):
        parse_cluster(text)


def test_cluster_names_are_unique_and_some_cluster_is_needed() -> None:
    with pytest.raises(LaunchError, match="given twice: a;"):
        parse_clusters(["a=1x1", "b=1x1", "a=2x1"])
    with pytest.raises(LaunchError, match="no cluster given; valid: --cluster NAME="):
        parse_clusters([])


def test_default_platform_follows_jax_platforms() -> None:
    assert [default_platform({"JAX_PLATFORMS": value}) for value in ("", "cpu", "rocm,cpu", "gpu", "tpu")] == [
        "cpu",
        "cpu",
        "rocm",
        "cuda",
        "cpu",
    ]
    assert default_platform({}) == "cpu"


def test_pythons(tmp_path: Path) -> None:
    clusters = parse_clusters(["left=1x1", "right=1x1"])
    assert parse_pythons([f"right={sys.executable}"], clusters) == {"right": sys.executable}
    for text in ("right", "right=", "middle=/bin/sh"):
        with pytest.raises(LaunchError, match="CLUSTER=PATH with CLUSTER one of left, right"):
            parse_pythons([text], clusters)
    with pytest.raises(LaunchError, match="given twice"):
        parse_pythons([f"left={sys.executable}"] * 2, clusters)
    with pytest.raises(LaunchError, match="not an executable file"):
        parse_pythons([f"left={tmp_path}/python"], clusters)


def test_every_process_gets_its_environment() -> None:
    plans = plan_processes(
        parse_clusters(["left=1x2", "right=2x1@cpu"]),
        ["python", "train.py", "--x"],
        environ={
            "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=9",
            "HETCCL_SECRET_FILE": "/old",
        },
        coordinator="127.0.0.1:77",
        secret="s3cret",
        python="/a/python",
        pythons={"right": "/b/python"},
        settings={"HETCCL_TRANSPORT": "tcp"},
    )
    assert [plan.name for plan in plans] == ["left/0", "right/0", "right/1"]
    assert [plan.command for plan in plans] == [(f"/{x}/python", "train.py", "--x") for x in "abb"]
    assert [plan.environ["XLA_FLAGS"] for plan in plans] == [
        f"--xla_a=1 --xla_force_host_platform_device_count={n}" for n in (2, 1, 1)
    ]
    assert redact(plans[2].environ) == {
        "HETCCL_COORDINATOR": "127.0.0.1:77",
        "HETCCL_CLUSTERS": "left:1,right:2",
        "HETCCL_CLUSTER": "right",
        "HETCCL_PROCESS": "1",
        "HETCCL_SECRET": "***",
        "HETCCL_TRANSPORT": "tcp",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=1",
    }
    assert plans[0].environ["HETCCL_SECRET"] == "s3cret"


def test_accelerators_are_dealt_out_without_overlap() -> None:
    def visible(environ: dict[str, str], variable: str) -> list[str | None]:
        plans = plan_processes(
            parse_clusters(["a=2x2@cuda", "b=1x1@rocm", "c=1x1@cuda", "d=1x1@cpu"]),
            ["train"],
            environ=environ,
            coordinator="h:1",
            secret="",
            python="p",
        )
        assert [plan.environ["JAX_PLATFORMS"] for plan in plans] == ["cuda,cpu"] * 2 + [
            "rocm,cpu",
            "cuda,cpu",
            "cpu",
        ]
        return [plan.environ.get(variable) for plan in plans]

    assert visible({}, "CUDA_VISIBLE_DEVICES") == ["0,1", "2,3", None, "4", None]
    assert visible({}, "HIP_VISIBLE_DEVICES") == [None, None, "0", None, None]
    five = {"CUDA_VISIBLE_DEVICES": "7,6,GPU-1,3,2"}
    assert visible(five, "CUDA_VISIBLE_DEVICES") == ["7,6", "GPU-1,3", "7,6,GPU-1,3,2", "2", "7,6,GPU-1,3,2"]
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=0,1 shows 2 devices.*at least 3"):
        platform_environ({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda", 2, 1)


def test_python_option_needs_a_python_command() -> None:
    clusters = parse_clusters(["left=1x1"])
    with pytest.raises(LaunchError, match="starts with 'bash'; write: -- python PROGRAM"):
        plan_processes(
            clusters,
            ["bash"],
            environ={},
            coordinator="",
            secret="",
            python="p",
            pythons={"left": "/b/python"},
        )
    with pytest.raises(LaunchError, match="no command given; valid: hetccl run"):
        plan_processes(clusters, [], environ={}, coordinator="", secret="", python="p")


def test_host_device_flags_keeps_the_others() -> None:
    assert host_device_flags("", 3) == "--xla_force_host_platform_device_count=3"


def test_lines_are_cut_at_any_boundary() -> None:
    text = b"one\r\n\ntwo \xff\nend"
    for size in range(1, len(text) + 1):
        splitter = LineSplitter()
        lines = [line for at in range(0, len(text), size) for line in splitter.feed(text[at : at + size])]
        assert [*lines, *splitter.finish()] == [b"one", b"", b"two \xff", b"end"], size


def test_redrawn_lines_are_thinned_out_but_the_last_one_comes() -> None:
    now = 0.0
    splitter = LineSplitter(lambda: now)
    assert list(splitter.feed(b"1%\r2%\r3%\r")) == [b"1%"]
    now = 2.0
    assert list(splitter.feed(b"50%\r60%\r")) == [b"3%"]  # the newest that is known to be complete
    assert list(splitter.feed(b"100%\nok\n")) == [b"100%", b"ok"]
    assert list(splitter.feed(b"1%\r2%\r")) == []
    assert list(splitter.finish()) == [b"2%"]
    assert list(splitter.finish()) == []


def test_an_endless_line_is_not_kept_in_memory() -> None:
    splitter = LineSplitter()
    got = [line for _ in range(10) for line in splitter.feed(b"x" * MAX_LINE)]
    assert [len(line) for line in got] == [MAX_LINE] * 9
    assert [len(line) for line in splitter.finish()] == [MAX_LINE]


# --- processes -------------------------------------------------------------------------------------


def test_output_is_prefixed_and_the_streams_are_kept_apart() -> None:
    done = _run("print('out'); print('err', file=sys.stderr); sys.stdout.write('part'); print('x'*200000)")
    assert done.returncode == 0
    names = ["left/0", "right/0", "right/1"]
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("out")) == [f"[{n}] out" for n in names]
    assert sorted(done.stderr.splitlines()) == [f"[{n}] err" for n in names]
    for name in names:
        own = [line.split("] ", 1)[1] for line in done.stdout.splitlines() if line.startswith(f"[{name}] ")]
        assert "".join(own) == "out" + "part" + "x" * 200000
    assert "\x1b" not in done.stdout + done.stderr


def test_a_partial_last_line_is_shown() -> None:
    done = _run("sys.stdout.write('no end')", clusters=("--cluster", "a=1x1"))
    assert done.stdout == "[a/0] no end\n"


@pytest.mark.parametrize("option", ["--bogus", "--transport=udp", "--timeout=soon", "--cluster=left=1x1"])
def test_wrong_arguments_exit_2(option: str) -> None:
    done = _run("pass", option)
    assert done.returncode == 2
    assert "hetccl run: error:" in done.stderr
    assert not done.stdout


def test_each_process_sees_its_settings() -> None:
    done = _run(
        "e = os.environ; print(e['HETCCL_CLUSTERS'], e['HETCCL_TRANSPORT'], e['HETCCL_TIMEOUT'], "
        "e['HETCCL_COORDINATOR'].split(':')[0], len(e['HETCCL_SECRET']) > 30, sys.executable)",
        *("--transport", "tcp", "--timeout", "7.5"),
    )
    expected = f"left:1,right:2 tcp 7.5 127.0.0.1 True {sys.executable}"
    assert sorted(done.stdout.splitlines()) == [f"[{n}] {expected}" for n in ("left/0", "right/0", "right/1")]


def test_one_cluster_on_another_python(tmp_path: Path) -> None:
    other = tmp_path / "otherpython"
    other.write_text(f'#!/bin/sh\nOTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    done = _run("print(os.environ.get('OTHER', 'no'))", "--python", f"right={other}")
    assert sorted(done.stdout.splitlines()) == ["[left/0] no", "[right/0] yes", "[right/1] yes"]


def test_the_first_failure_gives_the_status_and_stops_the_others() -> None:
    program = (
        "me = os.environ['HETCCL_CLUSTER'] + os.environ['HETCCL_PROCESS']\n"
        "if me == 'right1': time.sleep(.3); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('got TERM', flush=True), sys.exit(9)))\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    done = _run(program, "--settle", "0.3")
    assert done.returncode == 7
    assert time.monotonic() - start < 10
    assert "[hetccl] right/1 failed: exit status 7; stopping the others" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[left/0] got TERM", "[right/0] got TERM"]


def test_others_may_report_the_failure_before_they_are_stopped() -> None:
    program = (
        "if os.environ['HETCCL_CLUSTER'] == 'left': sys.exit(3)\n"
        "time.sleep(.5); print('peer lost', file=sys.stderr); sys.exit(1)"
    )
    done = _run(program)
    assert done.returncode == 3
    assert "[right/0] peer lost" in done.stderr and "[right/1] peer lost" in done.stderr


def test_death_by_signal_is_128_plus_n() -> None:
    program = "if os.environ['HETCCL_CLUSTER'] == 'left': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    done = _run(program, "--settle", "0")
    assert done.returncode == 137
    assert "left/0 failed: killed by SIGKILL (exit status 137)" in done.stderr


def test_what_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    program = (
        "if os.environ['HETCCL_CLUSTER'] == 'left': sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    start = time.monotonic()
    done = _run(program, "--settle", "0.5", "--grace", "0.5")
    assert done.returncode == 4
    assert time.monotonic() - start < 10
    assert "not ended in time, killing:" in done.stderr


# Its first life fails once the other cluster has told that it runs; the second one ends well.
_TWO_LIVES = (
    "import pathlib; file = pathlib.Path({folder!r}) / os.environ['HETCCL_CLUSTER']\n"
    "if os.environ['HETCCL_CLUSTER'] == 'left':\n"
    "    while not file.with_name('right').exists(): time.sleep(.02)\n"
    "    print('left ends'); sys.exit(0)\n"
    "if os.environ['HETCCL_PROCESS'] == '1': print(os.getpid(), flush=True); time.sleep({lasts})\n"
    "elif file.with_name('again').exists(): print('second life'); file.touch()\n"
    "else: time.sleep(.5); file.with_name('again').touch(); os.kill(os.getpid(), 9)\n"
)


def test_a_failed_cluster_is_started_again_as_a_whole(tmp_path: Path) -> None:
    done = _run(_TWO_LIVES.format(folder=str(tmp_path), lasts=2), "--restarts", "1")
    assert done.returncode == 0, done.stderr
    assert (
        "right/0 failed: killed by SIGKILL (exit status 137); starting its cluster again (0 more restarts)"
        in done.stderr
    )
    assert "[left/0] left ends" in done.stdout and "[right/0] second life" in done.stdout
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("[right/1]")]
    assert len(set(pids)) == 2 and _all_gone(pids)  # the process that had not failed ended too


def test_restarts_are_counted_in_all() -> None:
    program = "if os.environ['HETCCL_CLUSTER'] == 'right': sys.exit(5)\ntime.sleep(60)"
    done = _run(program, "--restarts", "2", "--settle", "0")
    assert done.returncode == 5
    said = [line for line in done.stderr.splitlines() if "failed: exit status 5" in line]
    assert [line.rpartition(";")[2] for line in said] == [
        " starting its cluster again (1 more restarts)",
        " starting its cluster again (0 more restarts)",
        " stopping the others",
    ]


def test_no_restart_behind_a_signal() -> None:
    program = "print(os.getpid(), flush=True)\nwhile True: time.sleep(1)"
    with _started(program, "--restarts", "9") as process:
        pids = [int(line) for line in _lines(process, 3)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert _all_gone(pids)


def test_a_command_that_does_not_exist() -> None:
    command = [sys.executable, "-m", "jax_hetccl.cli", "run", *_TWO, "--", "/no/such/program"]
    done = subprocess.run(command, env=_environ(), capture_output=True, check=False, text=True, timeout=60)
    assert done.returncode == 127
    assert "cannot start '/no/such/program': No such file" in done.stderr


def test_time_limit() -> None:
    done = _run("time.sleep(60)", "--time-limit", "0.7", "--grace", "1")
    assert done.returncode == 124
    assert "still running after the limit of 0.7 s: left/0, right/0, right/1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    program = (
        f"signal.signal({int(number)}, lambda n, _: (print('got', n, flush=True), sys.exit(0)))\n"
        "print(os.getpid(), flush=True)\nwhile True: time.sleep(1)"
    )
    with _started(program) as process:
        pids = [int(line) for line in _lines(process, 3)]
        process.send_signal(number)
        assert _lines(process, 3) == [f"got {int(number)}"] * 3
        assert process.wait(10) == 128 + number
        assert _all_gone(pids)


def test_a_second_ctrl_c_kills_at_once() -> None:
    program = "signal.signal(2, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    with _started(program, "--grace", "50") as process:
        pids = [int(line) for line in _lines(process, 3)]
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert _all_gone(pids)


_FAMILY = (  # a child in its own session and one that keeps the group, both holding the output pipes
    "import subprocess\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    "a = subprocess.Popen(sleep, start_new_session=True); b = subprocess.Popen(sleep)\n"
    "print(os.getpid(), a.pid, b.pid, flush=True)\n"
)


def test_a_killed_launcher_leaves_no_process() -> None:
    with _started(_FAMILY + "time.sleep(60)") as process:
        pids = [int(word) for line in _lines(process, 3) for word in line.split()]
        assert len(pids) == 9 and all(map(_alive, pids))
        process.kill()
        assert _all_gone(pids)


def test_a_finished_run_leaves_no_grandchild() -> None:
    done = _run(_FAMILY)
    assert done.returncode == 0
    pids = [int(word) for line in done.stdout.splitlines() for word in line.split()[1:]]
    assert len(pids) == 9 and _all_gone(pids, 1.0)


def test_ctrl_c_reaches_a_run_in_a_shell_background_job() -> None:
    # A non-interactive shell starts background jobs with SIGINT ignored; that must not be handed down.
    program = "print('pid', os.getpid(), flush=True); time.sleep(60)"
    command = _command(program, clusters=("--cluster", "a=1x1"))
    with subprocess.Popen(
        ["sh", "-c", '"$@" & echo "[sh] $!"; wait $!; exit $?', "sh", *command],
        env=_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        launcher, child = _lines(shell, 2)
        os.kill(int(launcher), signal.SIGINT)
        assert shell.wait(10) == 130
        assert _all_gone([int(child.split()[1])])


def test_a_closed_reader_stops_the_run() -> None:
    with _started("while True: print('x' * 100); time.sleep(.01)") as process:
        _lines(process, 3)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 141
