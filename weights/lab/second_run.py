"""Trains once more, mostly from counts, where a ranker stays behind them. Trains nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weights.lab.evaluate.baselines import COUNTS
from weights.lab.evaluate.evaluation import OwnValidation
from weights.lab.training.curve import TrainedRun
from weights.lab.training.settings import TrainSettings

SECOND_COUNTS_SHARE = 0.9
BEHIND = 0.005  # by so much of an AUC


def kept_run(
    first: TrainedRun, judge: Callable[[TrainedRun], OwnValidation], train_again: Callable[[TrainSettings], TrainedRun]
) -> tuple[TrainedRun, OwnValidation]:
    """The run to keep, and how its ranker compares on its own validation, which is what `judge` tells.

    If the first ranker is behind counts there, `train_again` gets settings with which most of each label is what counts expect, and the
    run with the better validation loss is kept.
    """
    judged = judge(first)
    if first.settings.counts_share >= SECOND_COUNTS_SHARE or not judged.is_behind(COUNTS, BEHIND):
        return first, judged
    second = train_again(replace(first.settings, counts_share=SECOND_COUNTS_SHARE))
    return (second, judge(second)) if second.status.best < first.status.best else (first, judged)
