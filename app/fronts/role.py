"""What a supervisor tells the processes that it starts: which one to be, and where to find the others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket

import msgspec

VARIABLE = "_RANKER_ROLE"  # not a setting: nobody sets it by hand
PR_SET_PDEATHSIG = 1


class Role(msgspec.Struct, frozen=True):
    """`path`: of the engine process's socket. A front also gets the descriptors of every front's listening sockets, by number,
    and one on which it reads its own number, when it is needed."""

    path: str
    supervisor: int
    listening: dict[int, list[int]] = {}
    assignment: int | None = None

    @classmethod
    def inherited(cls) -> Role | None:
        """Of this process, which then ends with its supervisor and leaves the signals of a terminal to it; None without a role."""
        told = os.environ.pop(VARIABLE, None)
        if told is None:
            return None
        role = msgspec.json.decode(told, type=cls)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != role.supervisor:
            os._exit(1)  # it has ended in the meantime
        return role

    def environment(self) -> dict[str, str]:
        """Of a process with this role."""
        return {**os.environ, VARIABLE: msgspec.json.encode(self).decode()}

    @property
    def is_front(self) -> bool:
        """Whether this is a front; else it is the engine process."""
        return self.assignment is not None

    def wait_assigned(self) -> tuple[int, list[socket.socket]]:
        """The number of this front and its listening sockets. It returns when the front is needed."""
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
