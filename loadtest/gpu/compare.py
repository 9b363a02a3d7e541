"""Compares two runs of the GPU bench figure by figure; the last line is one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from loadtest.gpu.table import Record


def figures(records: Sequence[Record]) -> dict[str, float]:
    """All figures by name: rows, times of operations, rates of products."""
    found: dict[str, float] = {}
    for each in records:
        if "figure" in each:
            found[each["name"]] = each["figure"]
        elif "us" in each:
            found[f"{each['geometry']} {each['operation']}, {each['rows']} rows: us"] = each["us"]
        elif "tflops" in each:
            found[f"{each['geometry']} {each['shape']} {each['rows']} rows {each['kind']}: TFLOP/s"] = each["tflops"]
    return found


def compare(sides: Sequence[Sequence[Record]]) -> int:
    """Print the ratios of two runs. Return 1 if the second has a problem that the first has not, 2 unless given two runs."""
    if len(sides) != 2:
        print("usage: python -m loadtest.gpu compare BEFORE AFTER", file=sys.stderr)
        return 2
    before, after = map(figures, sides)
    ratios = {name: after[name] / before[name] for name in before if before[name] and name in after}
    for name, ratio in ratios.items():
        print(f"{name:<70} {before[name]:>11.4g} {after[name]:>11.4g}  x {ratio:.3f}")
    problems = [{each["problem"] for each in side if "problem" in each} for side in sides]
    report = {"ratios": ratios, "missing": sorted(set(before) - set(after)), "new": sorted(set(after) - set(before))}
    print(json.dumps(report | {"new_problems": sorted(problems[1] - problems[0])}))
    return int(bool(problems[1] - problems[0]))
