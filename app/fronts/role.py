"""What a supervisor passes to each process it starts: its role, and where to find the others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket

import msgspec

VARIABLE = "_RANKER_ROLE"  # not a setting: nobody sets it by hand
PR_SET_PDEATHSIG = 1


class Role(msgspec.Struct, frozen=True):
    """`path` is that of the engine process's socket. A front also gets the descriptors of every front's listening sockets, by front
    number, and one from which it reads its own number when it is needed."""

    path: str
    supervisor: int
    listening: dict[int, list[int]] = {}
    assignment: int | None = None

    @classmethod
    def inherited(cls) -> Role | None:
        """Return this process's role, or None. With a role, the process dies with its supervisor and leaves a terminal's signals to it."""
        told = os.environ.pop(VARIABLE, None)
        if told is None:
            return None
        role = msgspec.json.decode(told, type=cls)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != role.supervisor:
            os._exit(1)  # the supervisor has ended meanwhile
        return role

    def environment(self) -> dict[str, str]:
        """Return the environment for a process with this role."""
        return {**os.environ, VARIABLE: msgspec.json.encode(self).decode()}

    @property
    def is_front(self) -> bool:
        """Whether it is a front; else it is the engine process."""
        return self.assignment is not None

    def wait_assigned(self) -> tuple[int, list[socket.socket]]:
        """Wait until this front is needed; return its number and its listening sockets."""
        assert self.assignment is not None
        number = int(os.read(self.assignment, 16) or b"0")
        if not number:
            os._exit(0)
        os.close(self.assignment)
        for other, descriptors in self.listening.items():
            if other != number:
                for descriptor in descriptors:
                    os.close(descriptor)
        return number, [socket.socket(fileno=descriptor) for descriptor in self.listening[number]]
