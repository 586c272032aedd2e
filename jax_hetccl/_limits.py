"""What the system lets this process have: enough to join, or one error that says how to get more."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from jax_hetccl._errors import ConfigError, HetcclError

# Descriptors of a world beside its peers, and for each process of it: sockets of the control plane, their wake-ups and
# monitors, one channel in each direction.
_FIXED, _EACH = 20, 9

_FIXES = {
    errno.EMFILE: "this process may open no more descriptors: raise `ulimit -n`",
    errno.ENFILE: "this machine may open no more descriptors: raise the sysctl fs.file-max",
    errno.ENOMEM: "the system gives no more memory: free some, or raise `ulimit -v` (and `ulimit -l` for RDMA)",
    errno.EAGAIN: "the system gives no more threads: raise `ulimit -u`, or `ulimit -v`, which bounds their stacks",
    errno.ENOSPC: "there is no space left: free some where the message says",
}


def ensure_descriptors(name: str, others: int) -> None:
    """Makes room for the descriptors of a world; raises the soft limit where the hard one allows it.

    Libraries below end the process, or wait for good, where they run out of descriptors in the middle.

    Args:
      name: of this process, for the error.
      others: number of the world's other processes.

    Raises:
      ConfigError: the hard limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + _FIXED + _EACH * others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{name} needs about {needed} file descriptors in a world of {others + 1} processes, but may open {hard}: "
            f"raise `ulimit -n` (Docker: --ulimit nofile=4096) before it starts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns running out of something into an error that says of what, and what to do.

    Raises:
      HetcclError: instead of the system's error; others pass.
    """
    try:
        yield
    except HetcclError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)  # also ZeroMQ's, which are no OSError
        if isinstance(error, MemoryError):
            number = errno.ENOMEM
        elif "can't start new thread" in str(error):
            number = errno.EAGAIN
        if number not in _FIXES:
            raise
        raise HetcclError(f"{what}: {error}; {_FIXES[number]}") from error
