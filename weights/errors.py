"""The errors of this package, for what a user can mend; programming mistakes raise what Python raises."""

import errno


class CheckpointError(Exception):
    """A checkpoint, or what it should be made from, is refused. The text is a sentence that names the file and the reason.

    Unprintable characters of hostile names are escaped and the text is bounded, so that it may go into a log as it is.
    """

    def __init__(self, text: str) -> None:
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:1000])
        super().__init__(shown)


class NotStored(CheckpointError):
    """What was to be written is not, for a reason that may pass: a full disk, another process that writes. Nothing has changed."""


class StorageFull(NotStored):
    """Nothing can be written: the disk or the quota is full, or the file system is read-only."""


class LogLost(NotStored):
    """The log of changes of a corpus that serves was deleted, cut or replaced: what it held may be gone at the next start."""


def kind_of(error: Exception) -> type[CheckpointError]:
    """The class to raise for an error, of a write, that is told anew."""
    if isinstance(error, CheckpointError):
        return type(error)
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return StorageFull if is_full else NotStored
