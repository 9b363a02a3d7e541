"""Calls the compiled kernel from Python: compares structs at load and checks every status. Knows nothing of caches."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from model.engine import EngineError
from model.native.build import KernelUnavailable, Vectors, build_kernel
from model.native.packing import STRUCTS

Int64, Pointer = ctypes.c_int64, ctypes.c_void_p
OUT_OF_MEMORY, NOT_FINITE = 1, 3  # of `Status` in kernel.cpp


class _Member(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", Int64), ("bytes", Int64))


Arguments = tuple[bytes | int, ...]
"""Of one forward. They must live until it ends."""


def arguments_of(
    contexts: Sequence[bytes], jobs: Sequence[bytes], columns: Iterable[bytes], scores: Iterable[int]
) -> Arguments:
    """`contexts`, `jobs`: packed structs. `columns`: post ids, author ids, surfaces, age buckets and codes of all candidates.
    `scores`: where logits, probabilities and continuous scores go.
    """
    return (b"".join(contexts), len(contexts), b"".join(jobs), len(jobs), *columns, *scores)


class Kernel:
    """A loaded library. `note` says what was unusual about its file, else it is empty."""

    def __init__(self, path: Path, note: str = "") -> None:
        """Raises KernelUnavailable if the file does not load, EngineError if its structs are not those of `packing`."""
        self.note = note
        self.library = open_library(path, STRUCTS)
        for name in ("strip", "enable_amx", "multiplies_bf16", "create", "forward", "open"):
            getattr(self.library, f"ranker_{name}").restype = Int64
        self.library.ranker_vectors.restype = ctypes.c_char_p
        # Calls that return at once keep the interpreter lock: releasing it and waiting for it would cost more.
        holding = ctypes.PyDLL(str(path))
        self._forward, self._begin, self._finish = (
            self.library.ranker_forward,
            holding.ranker_begin,
            holding.ranker_finish,
        )
        self._forward.argtypes = self._begin.argtypes = (Pointer, Pointer, Int64, Pointer, Int64, *[Pointer] * 8)
        self._begin.restype = self._finish.restype = Int64

    def vectors(self) -> str:
        """The vectors it was compiled for: avx512, avx2, neon, or plain, which is slow."""
        name: bytes = self.library.ranker_vectors()
        return name.decode()

    def strip(self) -> int:
        """How many columns of a packed matrix it reads together."""
        return int(self.library.ranker_strip())

    def enable_tiles(self) -> bool:
        """Run bf16 products on tile registers from now on, if there are any; returns whether they do."""
        return bool(self.library.ranker_enable_amx())

    def multiplies_bf16(self) -> bool:
        """Whether the processor multiplies bf16, so that it is faster than float32."""
        return bool(self.library.ranker_multiplies_bf16())

    def create(self, model: ctypes.Structure, threads: int, *, bf16: bool) -> tuple[ctypes.c_void_p, int]:
        """Make an engine, which `destroy` frees. Returns its pointer and how many threads it has: fewer if the system refuses more."""
        pointer, granted_threads = ctypes.c_void_p(), Int64(threads)
        status = self.library.ranker_create(
            ctypes.byref(model), Int64(bf16), ctypes.byref(granted_threads), ctypes.byref(pointer)
        )
        check_status(status, "make an engine")
        return pointer, granted_threads.value

    def forward(self, pointer: ctypes.c_void_p | None, arguments: Arguments) -> bool:
        """Run one forward; returns whether every score is finite."""
        return _is_finite(self._forward(pointer, *arguments))

    def open(self, pointer: ctypes.c_void_p | None) -> int | None:
        """A descriptor that becomes readable whenever a forward started by `begin` ends; None if none can be had."""
        descriptor = ctypes.c_int(-1)
        return descriptor.value if self.library.ranker_open(pointer, ctypes.byref(descriptor)) == 0 else None

    def begin(self, pointer: ctypes.c_void_p | None, arguments: Arguments) -> None:
        """Start one forward in the kernel's own threads. No other one may be running."""
        check_status(self._begin(pointer, *arguments), "begin a forward")

    def finish(self, pointer: ctypes.c_void_p | None) -> bool:
        """For the forward that has ended, returns whether every score is finite."""
        return _is_finite(self._finish(pointer))

    def destroy(self, pointer: ctypes.c_void_p) -> None:
        """End the engine's threads and free its memory."""
        self.library.ranker_destroy(pointer)


def open_library(path: Path, structs: Sequence[type[ctypes.Structure]]) -> ctypes.CDLL:
    """Load a kernel and compare its structs with ours. Raises KernelUnavailable, EngineError."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"the compiled kernel {path} does not load: {error}") from error
    library.ranker_members.restype = ctypes.POINTER(_Member)
    members = library.ranker_members()
    named = itertools.takewhile(lambda member: member.name, (members[i] for i in itertools.count()))
    theirs = {member.name.decode(): (member.offset, member.bytes) for member in named}
    ours = {}
    for struct in structs:
        ours[struct.__name__] = (0, ctypes.sizeof(struct))
        for name, *_ in struct._fields_:
            place = getattr(struct, name)
            ours[f"{struct.__name__}.{name}"] = (place.offset, place.size)
    different = sorted(dict(ours.items() ^ theirs.items()))
    if different:
        raise EngineError(f"the kernel and packing.py do not agree on {', '.join(different)}")
    return library


def load_kernel(
    directory: Path | None = None, *defines: str, vectors: Vectors = "auto", only_if_fast: bool = False
) -> Kernel:
    """The kernel of this machine; arguments and errors as in `build_kernel`.

    With `only_if_fast` it also raises KernelUnavailable if the processor lacks the vectors that the kernel is blocked for.
    """
    built = build_kernel(directory, *defines, vectors=vectors)
    kernel = Kernel(built.path, built.note)
    if only_if_fast and kernel.vectors() == "plain":
        raise KernelUnavailable("this processor has neither AVX2 and FMA nor NEON: torch's own products are faster")
    return kernel


def _is_finite(status: int) -> bool:
    check_status(status if status != NOT_FINITE else 0, "run a forward")
    return status == 0


def check_status(status: int, what: str) -> None:
    """Raises EngineError if the status says that the call failed."""
    if status:
        reason = "there is not enough memory" if status == OUT_OF_MEMORY else "the system refused"
        raise EngineError(f"the native kernel could not {what}: {reason}")
