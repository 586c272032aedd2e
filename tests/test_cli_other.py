"""`hetccl --version`, `hetccl secret` and `hetccl coordinator`."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_hetccl
from jax_hetccl._secret import check_strength
from jax_hetccl.cli import main
from jax_hetccl.launch.ports import reserve_port

# Where the package under test is: installed, or the source tree. A fresh clone has no built module in the latter.
_ROOT = str(Path(jax_hetccl.__file__).resolve().parents[1])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("hetccl ") and importlib.metadata.version("jax") in text


@pytest.mark.parametrize("arguments", [[], ["trian"], ["secret", "x"]])
def test_wrong_commands_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: hetccl" in capsys.readouterr().err


def test_secrets_are_strong_and_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret"]) == main(["secret"]) == 0
    one, two = capsys.readouterr().out.split()
    assert one != two
    check_strength(one)


def test_a_secret_file_is_private_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.secret"
    umask = os.umask(0)
    try:
        assert main(["secret", "--out", str(path)]) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    check_strength(text.strip())
    assert text.strip() not in "".join(capsys.readouterr())
    assert main(["secret", "--out", str(path)]) == 1
    assert "remove it first or choose another name" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str], dict[str, str]]]:
    """A running coordinator, its arguments and environment."""
    main(["secret", "--out", str(tmp_path / "s")])
    arguments = [sys.executable, "-m", "jax_hetccl.cli", "coordinator", "--clusters", "left:1,right:2"]
    arguments += ["--coordinator", f"127.0.0.1:{reserve_port()}", "--secret-file", str(tmp_path / "s")]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HETCCL_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, environ.get("PYTHONPATH")]))
    environ["PYTHONSAFEPATH"] = "1"
    with subprocess.Popen(arguments, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, arguments, environ
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_serves_until_it_is_stopped(
    coordinator: tuple[subprocess.Popen[str], list[str], dict[str, str]], number: int
) -> None:
    process, arguments, environ = coordinator
    assert process.stderr is not None
    assert "serves left:1,right:2" in process.stderr.readline()
    second = subprocess.run(arguments, env=environ, capture_output=True, check=False, text=True, timeout=60)
    assert second.returncode == 1
    assert "is another coordinator running there" in second.stderr
    process.send_signal(number)
    assert process.wait(20) == 0


def test_a_coordinator_lists_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--coordinator", "127.0.0.1:7000"]) == 1
    text = capsys.readouterr().err
    assert "HETCCL_CLUSTERS is missing" in text and "Valid settings" in text
