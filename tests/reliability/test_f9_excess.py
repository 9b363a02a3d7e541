"""F9 to F11: checkpoints that ask for too much, reloads without memory or threads, wrong kernel files; each ends on SIGTERM."""

from __future__ import annotations

import pytest

from loadtest.soak import excess


def test_f9_what_asks_for_too_much_is_refused_and_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = excess.checkpoints(1)
    assert row.ok, row
    # The control: a load without a deadline, and a client without patience, however fast a machine reads a terabyte of holes.
    monkeypatch.setattr(excess, "PATIENCE_SECONDS", 0.01)
    assert excess.checkpoints(1, reload__timeout_seconds=900).failed


def test_f10_a_reload_that_gets_no_threads_or_memory_leaves_the_old_version_serving() -> None:
    row = excess.starved_reloads(1, (2, 20))
    assert row.ok, row
    assert not excess.starved_reloads(1, (100_000,)).ok, "the control: where there is room it shows nothing"


def test_f11_a_wrong_kernel_file_is_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a library, mapped, would be a SIGBUS. The second start finds a whole one and has nothing to tell: red for that one."""
    monkeypatch.setitem(excess.KERNEL_FAULTS, "whole", lambda library: None)
    assert excess.kernels(("cut", "whole")).failed == 1
