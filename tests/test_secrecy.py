"""The secret shows nowhere but where its owner alone can look, and nothing is left where others can read it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from meeting import SECRET, Meeting, config

from jax_hetccl import _native, _secret
from jax_hetccl._config import resolve
from jax_hetccl._errors import ConfigError, HetcclError, RendezvousError
from jax_hetccl.launch.logs import LogFiles
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import channels, keys

# What the processes of a run see: of themselves, of each other, of their launcher.
PROGRAM = """
import json, logging, os, pathlib, sys, time
logging.basicConfig(level=logging.DEBUG)
from jax_hetccl._config import resolve
from jax_hetccl.rendezvous.join import join

settings = resolve(os.environ, join_timeout=2)
print(settings, repr(settings.secret is None))
seen = {"secret": settings.secret, "titles": [], "environ": []}
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            title = (entry / "cmdline").read_bytes() + (entry / "comm").read_bytes() + (entry / "status").read_bytes()
            seen["titles"].append(title.decode(errors="replace"))
        except OSError:
            pass
seen["environ"] = os.stat("/proc/self/environ").st_mode & 0o777
report = pathlib.Path(sys.argv[1])
if settings.cluster == 0:
    report.with_suffix(".new").write_text(json.dumps(seen))
    report.with_suffix(".new").rename(report)
else:
    for _ in range(600):  # the launcher stops the other one when this one fails
        if report.exists():
            break
        time.sleep(0.1)
    raise RuntimeError(f"fails with its settings: {settings}")
join(settings, {"agree": {}})  # the other one never comes: an error that says so
"""


def test_a_run_shows_its_secret_in_no_output_error_or_process_title(tmp_path: Path):
    program, report = tmp_path / "program.py", tmp_path / "report"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "jax_hetccl.cli", "run", "--cluster", "left=1x1@cpu", "--cluster", "right=1x1@cpu"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [*command, "--", sys.executable, str(program), str(report)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "fails with its settings" in done.stdout + done.stderr
    seen = json.loads(report.read_text())
    secret = seen["secret"]
    _secret.check_strength(secret)
    assert secret not in done.stdout + done.stderr
    assert len(seen["titles"]) >= 3 and any("program.py" in title for title in seen["titles"])
    assert all(secret not in title for title in seen["titles"])
    # The environment is where it is; the kernel shows that to the same user only.
    assert seen["environ"] & 0o077 == 0


def test_errors_and_logs_of_joining_never_repeat_a_secret_or_key(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    other = _secret.generate()
    texts: list[str] = []
    with Meeting(clusters="left:1,right:1") as meeting:
        waiting = meeting.start("left/0", join_timeout=2)
        for settings in ({"secret": other}, {"clusters": "left:1,right:1,third:1"}):
            with pytest.raises(RendezvousError) as wrong:
                meeting.start("right/0", join_timeout=1, **settings).result(10)
            texts.append(str(wrong.value) + repr(wrong.value))
        with pytest.raises(RendezvousError) as alone:
            waiting.result(10)
        texts.append(str(alone.value))
    with Meeting(clusters="left:1,right:1") as meeting:
        left, right = meeting.join("left/0", "right/0")
        private = [left._joined.keys[1], right._joined.keys[1], left.pair_key(1)]
        meeting.close("right/0")
        with pytest.raises(HetcclError) as gone:
            left.collect("never", [1], 5)
        texts.append(str(gone.value))
    with pytest.raises(ConfigError) as refused:
        resolve({}, coordinator="127.0.0.1:1", clusters="a:1,b:1", secret=SECRET, timeout=-1)
    texts += [str(refused.value), repr(config("left/0", reserve_port())), caplog.text]
    everything = "\n".join(texts)
    hidden = [SECRET.encode(), other.encode(), *private, keys.curve_pair(SECRET, "", keys.COORDINATOR)[1]]
    for key in hidden:
        assert key.decode("latin-1") not in everything and key.hex() not in everything and repr(key) not in everything


def test_a_secret_file_that_others_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "job.secret"
    path.write_text(_secret.generate() + "\n")
    for mode, warned in ((0o600, 0), (0o640, 1), (0o604, 2)):
        path.chmod(mode)
        _secret.read_file(str(path))
        assert len(caplog.records) == warned
    assert f"chmod 600 {path}" in caplog.text and path.read_text().strip() not in caplog.text


def test_logs_are_for_their_user_only(tmp_path: Path):
    (tmp_path / "left-0.log").write_text("of an earlier run")
    (tmp_path / "left-0.log").chmod(0o644)
    logs = LogFiles(tmp_path)
    for name in ("left/0", "right/0"):
        logs.line(0, name, 1, b"text")
    logs.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert logs.tail("left/0") == "text"


def test_a_world_and_its_shared_memory_leave_nothing_in_the_file_system():
    def open_files() -> set[str]:
        found = set()
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{entry}"))
        return found

    before, memory = open_files(), set(os.listdir("/dev/shm"))
    with Meeting(clusters="left:1,right:1") as meeting:
        listening, record = channels.listeners(config("right/0", meeting.port))
        started = meeting.start("left/0"), meeting.start("right/0", record)
        for name, future in zip(("left/0", "right/0"), started, strict=True):
            meeting.members[name] = future.result(20)
        [segment] = _native.make_shm_segment(4096, 2)
        try:
            kinds = {link.partition(":")[0] for link in open_files() - before}
            assert kinds <= {"socket", "anon_inode", "pipe", "/dev/null", "/memfd"}, kinds
            assert set(os.listdir("/dev/shm")) == memory
            # Nobody finds the socket by its name's place, and the name cannot be guessed.
            assert listening[1].getsockname() == b"\0" + record["unix"].encode()
            assert len(record["unix"].rpartition("-")[2]) == 16
        finally:
            os.close(segment)
            for sock in listening:
                sock.close()
