"""The pictures of an explanation: lines and bars stand where the figures say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from tests.weights.explain.test_figures import explained
from weights.explain import panels
from weights.explain.figures import figures_of
from weights.explain.panels import Labels
from weights.explain.retrieval import RetrievalFigures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Every picture that is drawn, in place of its PNG, which takes nearly all the time; other tests have those."""
    kept: dict[str, Figure] = {}

    def keep(name: str, title: str, caption: str, figure: Figure) -> panels.Panel:
        kept[name] = figure
        plt.close(figure)
        return panels.Panel(name, title, caption, b"")

    monkeypatch.setattr(panels, "_panel", keep)
    return kept


def test_what_is_marked_is_where_the_figures_say(drawn: dict[str, Figure]) -> None:
    history, candidates = 11, 7
    figures, ranker, request = explained(candidates, history)
    panels.draw(figures, Labels(request.tokens, [f"action {place}" for place in range(ranker.config.actions)]))
    for axes in drawn["mask"].axes:
        across, along = ([*line.get_xdata(), *line.get_ydata()] for line in axes.lines)
        assert across[:2] == along[2:] == [history + 0.5] * 2  # between the newest event and the first candidate
    window = drawn["rope"].axes[1].lines[1]
    assert set(window.get_ydata()) == {ranker.config.history_length}
    bars = drawn["candidate"].axes[1].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(ranker.config.layers)  # shares fill each layer's bar
    titles = [axes.get_title() for axes in drawn["soft-cap"].axes]
    assert [title.partition(":")[0] for title in titles] == [f"layer {n}" for n in range(ranker.config.layers)]


def test_a_model_as_upstream_initialises_it_is_drawn_too() -> None:
    _, ranker, request = explained(candidates=5, history=4)
    with torch.no_grad():
        ranker.heads.norm.zero_()  # every logit is 0
    figures = figures_of(ranker, request)
    assert not figures.leaking.any()
    names = [f"action {place}" for place in range(ranker.config.actions)]
    assert len(panels.draw(figures, Labels(request.tokens, names))) == 9


def test_ranks_begin_with_one(drawn: dict[str, Figure]) -> None:
    rng = np.random.default_rng(1)
    points = rng.standard_normal((50, 2)).astype(np.float32)
    ranks = rng.permutation(9) + 1
    cosines = np.linspace(1, 0.5, 9)
    topics = rng.integers(-1, 2, 50)
    panels.retrieval(
        RetrievalFigures(
            points, points[0], topics, ("chess", "jazz"), 0.4, np.arange(9), cosines, points[:9],
            np.arange(4), np.arange(5.0), ranks,
        )
    )  # fmt: skip
    places, histogram, order = drawn["retrieval"].axes
    assert (
        sum(len(scatter.get_offsets()) for scatter in places.collections) == 50 + 9
    )  # all posts, and the near ones ringed
    assert [*order.lines[0].get_xdata()] == list(range(1, 10))
    assert [*order.lines[0].get_ydata()] == ranks.tolist()
    assert set(histogram.lines[0].get_xdata()) == {cosines[-1]}
