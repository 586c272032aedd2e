"""Two tiny programs that keep a killed launcher from leaving anything behind. Standard library only.

Run by path with `python -I -S guard.py`, so that they start in a few milliseconds and need no package.

`guard.py exec PARENT -- COMMAND`
    asks the kernel to kill this process when the launcher dies, then becomes COMMAND. (Done here and not
    between fork and exec of the launcher: Python code there is not safe once the launcher has threads.)

`guard.py keep MARK`
    waits until its standard input ends, which is when the launcher has gone, however it went, and then
    kills every process whose environment carries MARK: also grandchildren, in whatever group or session
    they are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

VARIABLE = "_HETCCL_LAUNCH"  # not HETCCL_*: it is no setting
_PR_SET_PDEATHSIG = 1


def marked(mark: str) -> list[int]:
    """Processes of this machine whose initial environment carries the mark, zombies and this one left out."""
    wanted = f"{VARIABLE}={mark}".encode()
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:  # gone, or another user's
            continue
    return found


def kill_marked(mark: str, limit_s: float = 5.0) -> list[int]:
    """Kills them until none is left (each may have started others meanwhile).

    Returns the ones that are left after the limit.
    """
    end = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < end:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    return left


def _exec(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the line above
        os._exit(1)
    # Python ignores SIGPIPE, and a shell's background job ignores SIGINT; ignored signals survive exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hetccl run: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _keep(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_marked(mark)


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        _exec(int(sys.argv[2]), sys.argv[4:])
    else:
        _keep(sys.argv[2])
