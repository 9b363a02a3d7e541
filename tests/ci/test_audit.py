"""The audit of dependencies: no flaw, a flaw, and no knowledge are three answers."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / ".ci/audit"


def _package(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "version": "1.0", "vulns": [], **more}


FLAW = {"id": "PYSEC-1", "fix_versions": ["1.1"]}
SKIPPED = {"name": "odd", "skip_reason": "not found"}
AUDITS = {
    "clean": ([_package("a"), _package("b")], 0, "2 packages, no known vulnerability"),
    "a flaw": ([_package("a"), _package("b", vulns=[FLAW])], 1, "b 1.0: PYSEC-1, fixed in 1.1"),
    "one not looked up": ([_package("a"), SKIPPED], 1, "odd: not looked up"),
    "no network": ([SKIPPED, SKIPPED], 75, "no advisories can be had"),
}


@pytest.mark.parametrize(("packages", "code", "said"), AUDITS.values(), ids=AUDITS)
def test_the_audit_tells_no_flaw_from_no_knowledge(packages: list[object], code: int, said: str) -> None:
    found, text = runpy.run_path(str(AUDIT))["verdict"]({"dependencies": packages})
    assert found == code
    assert said in text


def test_pip_audit_reads_every_lock_that_is_audited() -> None:
    """Two locks with other hashes for one package, given together, were refused, and that was taken for a machine without the network."""
    audit = runpy.run_path(str(AUDIT))
    assert {lock.name for lock in audit["LOCKS"]} == {"development.lock", "requirements.lock", "torch-cuda.lock"}
    for lock in audit["LOCKS"]:
        done = subprocess.run([*audit["COMMAND"], str(lock), "--dry-run"], capture_output=True, text=True)
        assert "would have audited" in done.stdout + done.stderr, done.stderr
