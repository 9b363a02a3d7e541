"""Context states by the exact user and history that made them, least recently used out first. Not thread-safe but for `stats`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from model.config import ModelConfig
from model.engine import CacheStats
from model.inputs import Context

State = TypeVar("State")

# What an entry takes beside its numbers: key, dictionary places, the state's own objects. Measured on small entries, less
# their numbers: 630 to 1130 bytes of the native engine; the torch engine on a CPU takes about 300 more.
ENTRY_BYTES = 1536


class ContextKey(NamedTuple):
    """Names a context by the bytes the checkpoint sees of it. Equality compares the bytes, so a hash collision costs
    time, never a wrong score. One cache belongs to one loaded checkpoint.
    """

    user_id: int
    events: tuple[bytes, ...]  # by column, oldest event first

    @classmethod
    def of(cls, context: Context, config: ModelConfig) -> ContextKey:
        """The key of a context under the checkpoint's features."""
        return cls(context.user_id, context.events(config))

    def grew_from(self, older: ContextKey) -> bool:
        """Whether this is the older history of the same user with new events after it."""
        if self.user_id != older.user_id or len(self.events[0]) <= len(older.events[0]):
            return False
        return all(new.startswith(old) for new, old in zip(self.events, older.events, strict=True))


class ContextCache(Generic[State]):
    """At most `byte_budget` bytes of entries, all that they take included.

    `prefixes` allows a longer history to find the state of its own beginning, which is exact only where a context row never
    sees a later one and positions do not shift: causal and left-anchored.
    """

    def __init__(self, byte_budget: int, *, prefixes: bool) -> None:
        self.byte_budget = byte_budget
        self._prefixes = prefixes
        self._entries: OrderedDict[ContextKey, tuple[State, int]] = OrderedDict()
        self._latest: dict[int, ContextKey] = {}  # the user's most recent key, where a prefix is looked for
        self._bytes = self._hits = self._extended = self._misses = self._evictions = 0

    def find(self, key: ContextKey) -> State | None:
        """The state of exactly this context; counts a hit. A miss is counted by `find_prefix`."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        self._latest[key.user_id] = key
        return entry[0]

    def find_prefix(self, key: ContextKey) -> State | None:
        """The state of the beginning of this context; counts a prefix or a miss."""
        older = self._latest.get(key.user_id) if self._prefixes else None
        if older is not None and key.grew_from(older):
            self._extended += 1
            return self._entries[older][0]
        self._misses += 1
        return None

    def insert(self, key: ContextKey, state: State, size_bytes: int) -> None:
        """Keep a state of `size_bytes` numbers, unless it alone exceeds the budget, and evict what no longer fits."""
        size_bytes += sum(map(len, key.events)) + ENTRY_BYTES
        if size_bytes > self.byte_budget:
            return
        self._remove(key)
        self._entries[key] = (state, size_bytes)
        self._latest[key.user_id] = key
        self._bytes += size_bytes
        while self._bytes > self.byte_budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def clear(self) -> None:
        """Drop every state; the totals stay."""
        self._entries.clear()
        self._latest.clear()
        self._bytes = 0

    def stats(self) -> CacheStats:
        """A snapshot; may be called from any thread."""
        return CacheStats(
            bytes=self._bytes,
            entries=len(self._entries),
            hits=self._hits,
            prefixes=self._extended,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _remove(self, key: ContextKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._bytes -= entry[1]
        if self._latest.get(key.user_id) == key:
            del self._latest[key.user_id]
