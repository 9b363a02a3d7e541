"""This package's errors, for problems that a user can fix; programming mistakes raise Python's own exceptions."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where nothing more can be written into a file."""


class CheckpointError(Exception):
    """A checkpoint, or the input for making one, is refused. The text is a sentence that names the file and the reason.

    Unprintable characters in hostile names are escaped and the length is limited, so the text is safe to log as it is.
    """

    def __init__(self, text: str) -> None:
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:1000])
        super().__init__(shown)


class NotStored(CheckpointError):
    """A write failed for a reason that may pass, such as a full disk or another process that is writing. Nothing has changed."""


class StorageFull(NotStored):
    """Nothing can be written: the disk or the quota is full, or the file system is read-only."""


class LogLost(NotStored):
    """The change log of a served corpus was deleted, truncated or replaced: its changes may be gone at the next start."""


def reason_of(error: Exception) -> str:
    """What an error says, without a full stop, to be part of a sentence. Some, such as a MemoryError, say nothing but their name."""
    text = getattr(error, "strerror", None) or str(error).rstrip(".")
    return text or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)


def kind_of(error: Exception) -> type[CheckpointError]:
    """The class to raise when a failed write's error is raised again with more context. A file that was to be read on the way and could
    not be opened for want of descriptors or memory is no fault of the file: NotStored."""
    cause: BaseException = error
    while type(cause) is CheckpointError and cause.__cause__ is not None:
        cause = cause.__cause__
    number = getattr(cause, "errno", None)
    if isinstance(error, CheckpointError) and number not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return type(error)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return StorageFull if is_full else NotStored
