"""The alert and recording rules, judged by promtool: they parse, and every alert fires on trouble and only then."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml

from tests.ops.prometheus import CONFIG, ROOT, load_rules, promtool
from tests.test_docs import anchors

CASES = [ROOT / "tests/ops/alerts.test.yml", ROOT / "tests/ops/slow_alerts.test.yml"]
RULES = {
    name: yaml.safe_load((CONFIG / "rules" / name).read_text())["groups"] for name in ("recording.yml", "alerts.yml")
}
ALERTS = [rule["alert"] for rule in load_rules("alerts.yml")]


def write_rules(place: Path, file: str, alerts: Collection[str], expression: str) -> bool:
    """Write the rules of one committed file that these alerts consist of: themselves, and what they read. False if there are none.

    An `expression` takes the place of the alerts' own.
    """
    rules = [rule for groups in RULES.values() for group in groups for rule in group["rules"]]
    reads = expression or "".join(rule["expr"] for rule in rules if rule.get("alert") in alerts)
    names, kept = {*alerts, *re.findall(r"[\w:]+", reads)}, []
    for group in RULES[file]:
        rules = [rule for rule in group["rules"] if rule.get("alert", rule.get("record")) in names]
        kept += [group | {"rules": [rule | {"expr": expression} for rule in rules] if expression else rules}]
    kept = [group for group in kept if group["rules"]]
    place.write_text(json.dumps({"groups": kept}))
    return bool(kept)


def run_cases(directory: Path, case: Path, expression: str = "") -> subprocess.CompletedProcess[bytes]:
    """promtool's verdict on the cases of a file, or on that with this in the place of every alert's expression.

    Each case is judged with the rules that it asks for alone: with all of them promtool takes eight times as long.
    """
    document, asked = yaml.safe_load(case.read_text()), defaultdict(list)
    for group in document["tests"]:
        asked[frozenset(expected["alertname"] for expected in group["alert_rule_test"])].append(group)
    for alerts, groups in asked.items():
        name = "-".join(alerts)
        places = {directory / f"{name}-{file}": file for file in RULES}
        files = [str(place) for place, file in places.items() if write_rules(place, file, alerts, expression)]
        (directory / name).write_text(json.dumps(document | {"rule_files": files, "tests": groups}))
    return promtool("test", "rules", *(directory / "-".join(alerts) for alerts in asked))


def test_configuration_and_rules_are_accepted() -> None:
    checked = promtool("check", "config", CONFIG / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout.decode()


def test_promtool_refuses_a_rule_that_does_not_parse(tmp_path: Path) -> None:
    rule = {"alert": "Broken", "expr": "rate(ranker_ready)"}
    (tmp_path / "broken.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    assert promtool("check", "rules", tmp_path / "broken.yml").returncode != 0


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_alerts_fire_on_trouble_and_only_then(case: Path, tmp_path: Path) -> None:
    verdict = run_cases(tmp_path, case)
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
    verdict = "".join(run_cases(tmp_path, case, expression).stdout.decode() for case in CASES)
    assert set(re.findall(r"alertname: (\w+)", verdict)) == set(ALERTS)


def test_every_alert_names_a_severity_and_a_section_of_the_run_book() -> None:
    known = anchors(ROOT / "docs/operations.md")
    for rule in load_rules("alerts.yml"):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, rule["labels"]["severity"] in {"page", "ticket"}) == ("docs/operations.md", True), rule["alert"]
        assert anchor in known, f"{rule['alert']} points at {anchor}, which docs/operations.md lacks"
