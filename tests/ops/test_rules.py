"""The alert and recording rules, judged by promtool: they parse, and every alert fires on trouble and only then."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from tests.ops.prometheus import CONFIG, ROOT, load_rules, promtool
from tests.test_docs import anchors

CASES = [ROOT / "tests/ops/alerts.test.yml", ROOT / "tests/ops/slow_alerts.test.yml"]
INTERVALS = {
    "alerts.test.yml": "1m",
    "slow_alerts.test.yml": "30m",
}  # enough to judge what never or always fires, and much quicker
ALERTS = [rule["alert"] for rule in load_rules("alerts.yml")]


def run_cases(directory: Path, expression: str) -> str:
    """promtool's verdict on all cases with this in the place of every alert's expression."""
    document = yaml.safe_load((CONFIG / "rules/alerts.yml").read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = expression
    (directory / "alerts.yml").write_text(yaml.safe_dump(document))
    verdict = ""
    for case in CASES:
        changed = yaml.safe_load(case.read_text())
        changed |= {"rule_files": [str(directory / "alerts.yml")], "evaluation_interval": INTERVALS[case.name]}
        (directory / case.name).write_text(yaml.safe_dump(changed))
        verdict += promtool("test", "rules", directory / case.name).stdout.decode()
    return verdict


def test_configuration_and_rules_are_accepted() -> None:
    checked = promtool("check", "config", CONFIG / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout.decode()


def test_promtool_refuses_a_rule_that_does_not_parse(tmp_path: Path) -> None:
    rule = {"alert": "Broken", "expr": "rate(ranker_ready)"}
    (tmp_path / "broken.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    assert promtool("check", "rules", tmp_path / "broken.yml").returncode != 0


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_alerts_fire_on_trouble_and_only_then(case: Path) -> None:
    verdict = promtool("test", "rules", case)
    assert verdict.returncode == 0, verdict.stdout.decode()


def test_every_alert_has_a_firing_and_a_quiet_case() -> None:
    fired, quiet = defaultdict(int), defaultdict(int)
    for case in CASES:
        for group in yaml.safe_load(case.read_text())["tests"]:
            for expected in group["alert_rule_test"]:
                counts = fired if expected["exp_alerts"] else quiet
                counts[expected["alertname"]] += 1
    assert {name: (fired[name] > 0, quiet[name] > 0) for name in ALERTS} == dict.fromkeys(ALERTS, (True, True))


@pytest.mark.parametrize("expression", ["vector(0) > 1", "vector(1)"], ids=["never fires", "always fires"])
def test_a_rule_that_does_not_judge_fails_its_cases(tmp_path: Path, expression: str) -> None:
    verdict = run_cases(tmp_path, expression)
    assert set(re.findall(r"alertname: (\w+)", verdict)) == set(ALERTS)


def test_every_alert_names_a_severity_and_a_section_of_the_run_book() -> None:
    known = anchors(ROOT / "docs/operations.md")
    for rule in load_rules("alerts.yml"):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, rule["labels"]["severity"] in {"page", "ticket"}) == ("docs/operations.md", True), rule["alert"]
        assert anchor in known, f"{rule['alert']} points at {anchor}, which docs/operations.md lacks"
