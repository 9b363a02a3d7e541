"""API keys: who is asking. Not for what a caller may use up: that is admission's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from app.errors import Unauthorized
from app.settings import Auth

SCHEME = b"bearer "


class KeyRing:
    """Knows the SHA-256 of each key, never a key. Without any key everybody is let in, as nobody in particular."""

    def __init__(self, settings: Auth) -> None:
        self._digests = {
            name: bytes.fromhex(digest.get_secret_value()) for name, digest in sorted(settings.keys.items())
        }

    def caller(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The name that belongs to the key in `Authorization: Bearer KEY` or `X-API-Key: KEY`, None where no keys are set.

        Raises Unauthorized. Takes the same time whichever key is right, and whether one is.
        """
        if not self._digests:
            return None
        sent = headers.get(b"authorization", b"")
        key = sent[len(SCHEME) :].strip() if sent[: len(SCHEME)].lower() == SCHEME else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized
        return found
