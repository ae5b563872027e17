"""Histories of multi-turn conversations, bounded in number and length."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from qwen_vl_ros.engine.prompt import Turn


class Sessions:
    """
    Finished turns by session. Safe to use from several threads.

    :param most_sessions: the one longest unused goes when there are more.
    :param most_turns: the oldest turn of a session goes when there are more.
    :param most_bytes: of the frames that all sessions hold; sessions longest unused go first.
    """

    def __init__(
        self, most_sessions: int = 16, most_turns: int = 8, most_bytes: int = 256 << 20,
    ) -> None:
        self._most_sessions = most_sessions
        self._most_turns = most_turns
        self._most_bytes = most_bytes
        self._turns: OrderedDict[str, tuple[Turn, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def history(self, session_id: str) -> tuple[Turn, ...]:
        """Return the session's turns, oldest first; none for an empty or unknown id."""
        with self._lock:
            if session_id not in self._turns:
                return ()
            self._turns.move_to_end(session_id)
            return self._turns[session_id]

    def store(self, session_id: str, turns: tuple[Turn, ...]) -> None:
        """Replace a session's turns; does nothing for the empty id."""
        if not session_id:
            return
        with self._lock:
            self._turns[session_id] = turns[-self._most_turns:]
            self._turns.move_to_end(session_id)
            while len(self._turns) > self._most_sessions or self._bytes() > self._most_bytes:
                self._turns.popitem(last=False)

    def _bytes(self) -> int:
        """Return the bytes of all frames held."""
        return sum(v.frame_bytes for turns in self._turns.values() for turn in turns
                   for v in turn.visuals)

    def clear(self) -> None:
        """Forget all sessions."""
        with self._lock:
            self._turns.clear()

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._turns)


def without_repeats(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """
    Leave out visuals that an earlier turn already shows.

    A second question on the same picture then continues the conversation about it, and everything
    before the new words is in the cache.
    """
    seen: set[int] = set()
    result = []
    for turn in turns:
        fresh = tuple(v for v in turn.visuals if v.key not in seen)
        seen.update(v.key for v in turn.visuals)
        result.append(replace(turn, visuals=fresh))
    return tuple(result)
