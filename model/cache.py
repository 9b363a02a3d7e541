"""An LRU cache of context states, keyed by the exact user and history that made them, and the handles that callers name them by.

Used by one thread only, except `stats` and `context_of`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from model.config import ModelConfig
from model.engine import CacheStats, Item
from model.inputs import Context

State = TypeVar("State")

# Bytes of an entry besides its numbers: key, dictionary slots, the state's own objects. Measured on small entries, without their
# numbers: 630 to 1130 bytes with the native engine; the torch engine on a CPU takes about 300 more.
ENTRY_BYTES = 1536
HANDLE_BYTES = 768  # of a handle: its text, its caller, slots in two dictionaries
DIGEST_BYTES = 16


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
        """Whether this is the same user's older history with new events appended."""
        if self.user_id != older.user_id or len(self.events[0]) <= len(older.events[0]):
            return False
        return all(new.startswith(old) for new, old in zip(self.events, older.events, strict=True))


@dataclass(slots=True, eq=False)
class Entry(Generic[State]):
    """A kept state. `handles`: by caller and number of older history items dropped. `digest`: of the key, made with the first handle.
    `is_kept`: False once it is evicted."""

    key: ContextKey
    state: State
    size_bytes: int
    handles: dict[tuple[str, int], str] = field(default_factory=dict)
    digest: bytes = b""
    is_kept: bool = True


class ContextCache(Generic[State]):
    """Holds entries of at most `byte_budget` bytes in all, their overhead included.

    `prefixes` lets a longer history find the state of its own beginning, which is exact only if a context row never sees a later
    one and positions do not shift: causal and left-anchored.

    A handle is a keyed digest of the key's bytes, the caller and the number of dropped items. Each cache has its own secret, so another
    process, or the next load of the same checkpoint, has different handles, and a handle reveals neither a history nor another handle.
    """

    def __init__(self, byte_budget: int, *, prefixes: bool) -> None:
        self.byte_budget = byte_budget
        self._prefixes = prefixes
        self._entries: OrderedDict[ContextKey, Entry[State]] = OrderedDict()
        self._latest: dict[int, ContextKey] = {}  # the user's most recent key, the only one tried as a prefix
        # the entry's key, the caller, and how many items were dropped
        self._handles: dict[str, tuple[ContextKey, str, int]] = {}
        self._secret = os.urandom(hashlib.blake2b.MAX_KEY_SIZE)
        self._bytes = self._hits = self._extended = self._misses = self._evictions = 0

    def find(self, key: ContextKey) -> Entry[State] | None:
        """The entry of exactly this context; counts a hit. `find_prefix` counts the misses."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        self._latest[key.user_id] = entry.key  # equal to `key`, but it is this object whose bytes are counted
        return entry

    def find_prefix(self, key: ContextKey) -> State | None:
        """The state of the beginning of this context; counts a prefix or a miss."""
        older = self._latest.get(key.user_id) if self._prefixes else None
        if older is not None and key.grew_from(older):
            self._extended += 1
            return self._entries[older].state
        self._misses += 1
        return None

    def insert(self, key: ContextKey, state: State, size_bytes: int) -> Entry[State] | None:
        """Keep a state with `size_bytes` of numbers, evict what no longer fits, return the entry; None if it alone exceeds the budget."""
        size_bytes += sum(map(len, key.events)) + ENTRY_BYTES
        if size_bytes > self.byte_budget:
            return None
        self._remove(key)
        entry = self._entries[key] = Entry(key, state, size_bytes)
        self._latest[key.user_id] = key
        self._bytes += size_bytes
        self._evict()
        return entry

    def handle(self, entry: Entry[State], item: Item) -> str:
        """The entry's handle for the caller of this item; empty if none is wanted or the entry is not kept."""
        if item.caller is None or not item.context.is_kept:
            return ""
        handle = entry.handles.get(whose := (item.caller, item.context.dropped))
        return self._make_handle(entry, whose) if handle is None else handle

    def name(self, item: Item, config: ModelConfig) -> str:
        """The handle of an item's context, which is kept without a state; empty as in `handle`."""
        if item.caller is None:
            return ""
        key = ContextKey.of(item.context, config)
        entry = self.find(key) or self.insert(key, None, 0)  # type: ignore[arg-type]  # nobody asks for it
        return "" if entry is None else self.handle(entry, item)

    def context_of(self, handle: str, caller: str, config: ModelConfig) -> Context | None:
        """The context of this caller's handle, None if it is not kept. Safe to call from any thread without a lock: it is one lookup in a
        dictionary of strings, which the interpreter makes atomic, and the values never change. If the entry is evicted a moment later,
        the context is computed again from these columns.
        """
        key, owner, dropped = self._handles.get(handle, (None, "", 0))
        if key is None or owner != caller:
            return None
        return Context.of_events(key.user_id, key.events, config, dropped)

    def clear(self) -> None:
        """Drop every state; the totals stay."""
        self._entries.clear()
        self._latest.clear()
        self._handles.clear()
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

    def _make_handle(self, entry: Entry[State], whose: tuple[str, int]) -> str:
        if not entry.is_kept or entry.size_bytes + HANDLE_BYTES > self.byte_budget:
            return ""
        key = entry.key
        if not entry.digest:
            digest = hashlib.blake2b(struct.pack("<2Q", key.user_id, len(key.events[0])), key=self._secret)
            for column in key.events:
                digest.update(column)
            entry.digest = digest.digest()
        caller, dropped = whose
        owner = b"%d %b" % (dropped, caller.encode())
        handle = hashlib.blake2b(owner, key=entry.digest, digest_size=DIGEST_BYTES).hexdigest()
        entry.handles[whose] = handle
        self._handles[handle] = key, caller, dropped
        entry.size_bytes += HANDLE_BYTES
        self._bytes += HANDLE_BYTES
        self._evict()
        return handle

    def _evict(self) -> None:
        while self._bytes > self.byte_budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _remove(self, key: ContextKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.is_kept = False
        self._bytes -= entry.size_bytes
        for handle in entry.handles.values():
            del self._handles[handle]
        entry.handles.clear()
        if self._latest.get(key.user_id) == key:
            del self._latest[key.user_id]
