"""The audit of dependencies: no flaw, a flaw, and no knowledge are three answers."""

from __future__ import annotations

import runpy
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
