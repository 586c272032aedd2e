"""Connections that nobody has vouched for yet: at most so many, shared out fairly between where they come from."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")


class Crowd(Generic[Key]):
    """Knows whom to drop when strangers are too many. Used by one thread; closes nothing itself.

    The source with the most connections loses its oldest one. So whoever floods a port displaces itself, and a member
    that connects from elsewhere has the time that its handshake may take.

    Example:
      >>> crowd = Crowd(limit=2)
      >>> crowd.add("a1", "a"), crowd.add("b1", "b"), crowd.add("a2", "a")
      (None, None, 'a1')
    """

    def __init__(self, limit: int) -> None:
        """`limit`: how many connections may be in it."""
        self._limit = limit
        self._sources: dict[Key, str] = {}
        self._members: dict[str, dict[Key, None]] = {}  # by source; in the order in which they came

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, key: Key) -> bool:
        return key in self._sources

    def add(self, key: Key, source: str) -> Key | None:
        """Takes a new connection in; returns the one to drop, which is in it no more, if they are too many.

        Args:
          key: names the connection.
          source: where it comes from, such as an address.
        """
        self._sources[key] = source
        self._members.setdefault(source, {})[key] = None
        return self.oust() if len(self._sources) > self._limit else None

    def discard(self, key: Key) -> None:
        """The connection ended, or belongs to a member; nothing happens if it is not in it."""
        source = self._sources.pop(key, None)
        if source is None:
            return
        del self._members[source][key]
        if not self._members[source]:
            del self._members[source]

    def oust(self) -> Key | None:
        """Takes out the connection that is to go first; None if there is none."""
        if not self._members:
            return None
        largest = max(self._members.values(), key=len)
        key = next(iter(largest))
        self.discard(key)
        return key
