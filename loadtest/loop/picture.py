"""The days of the demo as a picture and as a table. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from loadtest.loop.settings import KINDS, LoopSettings
from loadtest.rows import markdown

if TYPE_CHECKING:
    from loadtest.loop.run import Day

STYLES: dict[str, dict[str, Any]] = {
    "optimum": {"color": "#777777", "linestyle": "--"},
    "loop": {"color": "#1d6fb8", "linewidth": 2.4, "marker": "o"},
    "frozen": {"color": "#c4562e", "linewidth": 1.8, "marker": "s"},
    "chance": {"color": "#777777", "linestyle": ":"},
}
LABELS = {
    "optimum": "the best possible order",
    "loop": "the service, with a nightly turn",
    "frozen": "the model of day 0, never trained again",
    "chance": "a random order",
}


def draw_picture(days: Sequence[Day], settings: LoopSettings, path: Path) -> None:
    """Draw the mean reward of an impression by day."""
    figure = Figure(figsize=(9, 4.2), layout="constrained", dpi=130)
    axes = figure.add_subplot(xlabel="day", ylabel="expected reward of an impression")
    for kind in KINDS:
        axes.plot([day.day for day in days], [day.rewards[kind] for day in days], label=LABELS[kind], **STYLES[kind])
    top = max(day.rewards["optimum"] for day in days)
    notes = {
        settings.drift_day - 0.5: "tastes change",
        settings.poisoned_day + 0.5: "labels shuffled:\nthe night is refused",
    }
    for place, words in notes.items():
        if place < len(days):
            axes.axvline(place, color="#bbbbbb", linewidth=1)
            axes.annotate(words, (place, top), xytext=(4, -2), textcoords="offset points", va="top", fontsize=9)
    axes.set_xticks([day.day for day in days])
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Software": None})


def table_of(days: Sequence[Day]) -> str:
    """The rewards by day, the share of the gap between frozen and optimum that the loop recovers, and how the night's turn ended."""
    head = ["day", *KINDS, "share of the gap", "the night's turn"]
    rows = []
    for day in days:
        rewards = [f"{day.rewards[kind]:.3f}" for kind in KINDS]
        rows.append([str(day.day), *rewards, f"{day.recovered:+.2f}", ending_of(day)])
    return markdown(head, rows)


def unseen_table(turns: Sequence[Mapping[str, Any]]) -> str:
    """The AUC within users of the score, of the serving model and of the new one, on held-out impressions whose user, post or author was
    not trained on that night, and on the others; a row for each night and kind of id that has both. `turns`: their `figures.json`."""
    head = ["night", "id", "share not trained on", "serving there", "new there", "serving elsewhere", "new elsewhere"]
    rows = []
    for night, turn in enumerate(turns):
        for kind, unseen in (turn["judged"] or {"unseen": {}})["unseen"].items():
            figures = [*unseen["order"], *unseen["order_of_others"]]
            if all(figure["low"] is not None for figure in figures):
                rows.append([str(night), kind, f"{unseen['share']:.1%}", *map(cell_of, figures)])
    return markdown(head, rows)


def cell_of(figure: Mapping[str, float]) -> str:
    """A figure with its interval."""
    return f"{figure['value']:.3f} ({figure['low']:.3f} … {figure['high']:.3f})"


def ending_of(day: Day) -> str:
    """How the night's turn ended, in a word or two."""
    if " is refused: " in day.sentence:
        return "refused: " + day.sentence.split(" is refused: ")[1].split(".")[0]
    return "published" if " published " in day.sentence else "–"
