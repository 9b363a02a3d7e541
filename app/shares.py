"""A budget that the API keys share, so that none shuts out another. Pure counting; knows neither HTTP nor an engine."""

from __future__ import annotations


def over_share(held: int, count: int, used: int, limit: int, share: float) -> int:
    """By how much a key would exceed its share of a budget; 0 or less if it would not. `held`: what the key holds; `count`: what it would
    take; `used`: how much of the budget, which is `limit`, is taken.

    This is the dynamic threshold of Choudhury and Hahne (1998): a key may hold share / (1 − share) times what is free. The fuller the
    budget, the less each key may hold, so that a newcomer finds room. A key that is alone fills its share exactly where `used` counts what
    it would take, as in `Shares`. Where it does not, as in `Admission`, its last request may go over the share by share × count. With a
    share of 1 there is no threshold.
    """
    if share >= 1:
        return 0
    return held + count - int(share / (1 - share) * (limit - used))


class Shares:
    """What the requests of all keys hold of a budget. Used by the event loop only; each process has its own.

    A key without a name (None: no keys are set) has no threshold. A request of a key that holds nothing else only needs room.
    """

    def __init__(self, limit: int, share: float) -> None:
        self.limit = limit
        self.share = share
        self.used = 0
        self._held: dict[str | None, int] = {}  # of keys that hold something

    def has_room(self, key: str | None, count: int, own: int = 0, limit: int | None = None) -> bool:
        """Whether a request that already holds `own` may take `count` more. `limit`: of a part of the budget, by default all of it."""
        limit = self.limit if limit is None else limit
        if self.used + count > limit:
            return False
        held = self._held.get(key, 0)
        return key is None or held == own or over_share(held, count, self.used + count, limit, self.share) <= 0

    def take(self, key: str | None, count: int) -> None:
        """Hold this much; a negative count gives it back."""
        self.used += count
        held = self._held.get(key, 0) + count
        if held:
            self._held[key] = held
        else:
            self._held.pop(key, None)
