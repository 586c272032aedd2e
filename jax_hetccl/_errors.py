"""The exceptions of jax_hetccl, and the map from native failure kinds to them.

Every error names what was attempted, who was involved (cluster/process, rank), what was expected and
found, and what to do about it.
"""

from __future__ import annotations


class HetcclError(RuntimeError):
    """Base of all errors raised by jax_hetccl."""


class ConfigError(HetcclError, ValueError):
    """Settings are missing or wrong. Lists every problem and all valid settings."""


class RendezvousError(HetcclError):
    """The clusters could not meet: someone is missing, refused, unreachable or held twice."""


class AgreementError(HetcclError):
    """Clusters met but disagree, for example on the size of a mesh axis."""


class MismatchError(HetcclError):
    """Two clusters called different collectives, or the same one on different shapes or types."""


class PeerLostError(HetcclError):
    """A process of another cluster died or became unreachable."""


class ExchangeTimeoutError(HetcclError):
    """A peer did not arrive at an exchange, or a transfer made no progress, within its bound."""


class UnsupportedError(HetcclError, NotImplementedError):
    """A use that jax_hetccl refuses because it would not be right."""


# "corrupt", "aborted" and "internal" carry no remedy of their own that a program could catch for.
_KINDS: dict[str, type[HetcclError]] = {
    "peer_lost": PeerLostError,
    "timeout": ExchangeTimeoutError,
    "mismatch": MismatchError,
    "agreement": AgreementError,
}


def error_from(kind: str, message: str) -> HetcclError:
    """Returns the exception for a failure of the native engine.

    Args:
      kind: the engine's failure kind, such as `"peer_lost"` or `"timeout"`.
      message: the failure's text; becomes the exception's text unchanged.

    Returns:
      An exception to raise; plain `HetcclError` for kinds without a class of their own.

    Example:
      >>> error_from("peer_lost", "right/0 died")
      PeerLostError('right/0 died')
    """
    return _KINDS.get(kind, HetcclError)(message)
