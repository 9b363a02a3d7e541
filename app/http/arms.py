"""Which of the held checkpoints answers a request: the one that its caller names, else by a hash of its user."""

from __future__ import annotations

import hashlib
from typing import Any

from app.errors import NotFound
from app.interface import ServedModel, Service
from app.request.tensors import describe_model
from app.settings import Split

ANY = ("", "")  # name and version of a model, where the caller names none
USERS = 2**64
HEADER = b"x-model-version"


class Arms:
    """A and B of a split by user. Belongs to the event loop."""

    def __init__(self, service: Service, split: Split) -> None:
        self.differ = split.users > 0  # between users
        self._service = service
        self._split = split

    def model(self, user_id: int | str, wanted: tuple[str, str] = ANY) -> ServedModel:
        """The requested model: by a version as `named` finds it, by name the user's own if it matches. Raises NotFound or NotReady."""
        own = self._of(user_id)
        return own if not wanted[1] and _is(own, wanted) else named(self._service, *wanted)

    def _of(self, user_id: int | str) -> ServedModel:
        if self._split.users and (second := self._service.second) is not None and second.answers:
            assert second.model is not None
            if is_second(user_id, self._split):
                return second.model
        return self._service.model


def is_second(user_id: int | str, split: Split) -> bool:
    """Whether the split draws this user for the second checkpoint: BLAKE2b of the id, keyed with the experiment's name, lies in the
    lowest share. A larger share keeps whom a smaller one has drawn. User 0 (anonymous) and invalid ids are never drawn.
    """
    try:
        data = int(user_id).to_bytes(8, "little")
    except (ValueError, OverflowError):
        return False
    digest = hashlib.blake2b(data, key=split.experiment.encode(), digest_size=8).digest()
    return any(data) and int.from_bytes(digest, "little") < int(split.users * USERS)


def named(service: Service, name: str, version: str = "") -> ServedModel:
    """The held model of that name and version, the first where both are; empty means any. Raises NotFound or NotReady."""
    for model in held(service):
        if _is(model, (name, version)):
            return model
    raise NotFound("No model of that name and version serves here.")


def described(service: Service, name: str, version: str = "") -> dict[str, Any]:
    """The Open Inference Protocol's metadata of the model `named`, with every version of that name. Raises as `named`."""
    found = named(service, name, version).manifest
    versions = [model.manifest.version for model in held(service) if model.manifest.name == found.name]
    return describe_model(found) | {"versions": sorted(set(versions), key=versions.index)}


def held(service: Service) -> list[ServedModel]:
    """The models that are served. Raises NotReady."""
    second = service.second
    return [service.model, *([] if second is None or second.model is None else [second.model])]


def _is(model: ServedModel, wanted: tuple[str, str]) -> bool:
    return wanted[0] in ("", model.manifest.name) and wanted[1] in ("", model.manifest.version)
