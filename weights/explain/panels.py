"""Draws the pictures of an explanation as PNG. Computes nothing: every number is in `figures`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from weights.explain.figures import DRAWN_TOKENS, Figures
from weights.explain.retrieval import RetrievalFigures
from weights.report import BLUE, GREY, YELLOW, png

SHADES = "Blues"
SIGNS = "RdBu"
LETTERS = 28
COLOURS = (GREY, BLUE, YELLOW)


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture with its name, title and caption."""

    name: str
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the tokens and the actions."""

    tokens: Sequence[str]
    actions: Sequence[str]


def draw(figures: Figures, labels: Labels) -> list[Panel]:
    """Draw every panel that this model has."""
    makers: list[Callable[[Figures, Labels], Panel | None]] = [
        mask, isolation, positions, attention, enlarged, soft_cap, updates, leave_one_out, rope,
    ]  # fmt: skip
    made = (make(figures, labels) for make in makers)
    return [panel for panel in made if panel is not None]


def mask(figures: Figures, labels: Labels) -> Panel:
    """1: which token sees which."""
    figure, grid = plt.subplots(1, 2, figsize=(10, 5.2), layout="constrained")
    for axes, matrix, title in zip(grid, (figures.mask, figures.causal), ("ranking", "plain causal"), strict=True):
        axes.imshow(matrix, cmap=SHADES, vmin=0, vmax=1.2, interpolation="nearest")
        axes.set_title(title)
        _token_axes(axes, figures, labels)
    text = (
        "Dark = sees. A row is a token that asks, a column one that it may look at. Left, the mask that the "
        "plain path used for this request: the context sees its past, "
        "each candidate the whole context and itself, never another candidate. Right, plain causal attention, "
        "in which a candidate sees those before it. Padding is a white column."
    )
    return _panel("mask", "Who sees whom", text, figure)


def isolation(figures: Figures, labels: Labels) -> Panel:
    """2: how much one candidate moves another."""
    figure, grid = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    most = max(float(figures.leaking.max()), 1e-8)
    for axes, moves, title in zip(
        grid, (figures.isolation, figures.leaking), ("ranking mask", "control: causal mask"), strict=False
    ):
        image = axes.imshow(
            np.log10(np.maximum(moves, 1e-9)), cmap=SHADES, vmin=-9, vmax=np.log10(most), interpolation="nearest"
        )
        axes.set(title=title, xlabel="candidate that was replaced", ylabel="candidate whose logits moved")
    figure.colorbar(image, ax=grid[:2], label="largest change of a logit, log10; white = exactly 0", shrink=0.8)
    place = np.arange(len(figures.isolation))
    for shift, (kind, moved) in enumerate(figures.reversed_list.items()):
        grid[2].bar(
            place + 0.4 * shift, moved, 0.4, label=f"{kind}: at most {moved.max():.2g}", color=COLOURS[1 + shift]
        )
    grid[2].set(title="the list turned round", xlabel="candidate", ylabel="largest change of a logit")
    grid[2].legend()
    others = figures.isolation[~np.eye(len(place), dtype=bool)]
    text = (
        "Cell (i, j): the largest change of candidate i's logits when candidate j becomes another post. With "
        "the ranking mask the largest change of another candidate is "
        f"{others.max(initial=0):g}. The control has the causal mask: "
        f"{figures.leaking[np.tril_indices(len(place), -1)].max(initial=0):.2g} below the diagonal. "
        "Right: with shared positions the order of the list does not matter; with sequential ones a score "
        "depends on its slot."
    )
    return _panel("isolation", "Isolation, measured", text, figure)


def positions(figures: Figures, labels: Labels) -> Panel:
    """3: the position of each token."""
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for (kind, values), style in zip(figures.positions.items(), (".", "+", "x"), strict=True):
        axes.plot(values, style, label=kind, alpha=0.8)
    _lines(axes, figures.history + 0.5, both=False)
    axes.set(xlabel="token: user, history oldest first, candidates", ylabel="RoPE position")
    axes.legend()
    text = (
        "What rotates queries and keys. Shared: every candidate sits on the first slot behind a full history, "
        "so no score depends on the slot. Sequential: the published "
        "pipeline's. Right-anchored: the history ends at the candidates, so that the newest event has the "
        "same distance whatever came before."
    )
    return _panel("positions", "Positions", text, figure)


def attention(figures: Figures, labels: Labels) -> Panel:
    """4: all heads of all layers, small."""
    layers, heads = figures.attention.shape[:2]
    figure, grid = plt.subplots(
        layers, heads, figsize=(1.7 * heads + 0.8, 1.7 * layers + 0.4), squeeze=False, layout="constrained"
    )
    border = (figures.history + 1) * figures.attention.shape[2] / len(figures.mask) - 0.5
    for layer in range(layers):
        spread = figures.attention[layer].max(-1).mean(-1)
        for column, head in enumerate(np.argsort(spread)):
            axes = grid[layer, column]
            image = axes.imshow(figures.attention[layer, head], cmap=SHADES, vmin=0, vmax=0.5)
            _lines(axes, border, both=True)
            axes.set(xticks=[0, border], yticks=[0, border])
            axes.set_xticklabels(["user", "candidates"], fontsize=5)
            axes.set_yticklabels(["user", "candidates"], fontsize=5, rotation=90)
            axes.set_title(f"layer {layer}, head {head}", fontsize=7)
    figure.colorbar(image, ax=grid, label="attention weight, 0.5 and above", shrink=0.8)
    figure.supxlabel("looked at: user, events oldest first, | candidates", fontsize=8)
    figure.supylabel("asks", fontsize=8)
    drawn = f" Above {DRAWN_TOKENS} tokens a pixel is the mean of a block." if len(figures.mask) > DRAWN_TOKENS else ""
    text = (
        "Dark = much; dashed lines show where the candidates begin. A picture a head, flat heads on the left of "
        "their row and spiky ones on the right. fp32, the plain path. "
        f"Rows sum to 1 within {figures.row_error:.1g}.{drawn}"
    )
    return _panel("attention", "Attention of every head", text, figure)


def enlarged(figures: Figures, labels: Labels) -> Panel:
    """4 for one candidate, beside the shares."""
    rows = figures.rows
    names = [*labels.tokens[: rows.shape[2] - 1], "itself"]
    figure, grid = plt.subplots(
        1, 2, figsize=(12, max(3.5, 0.22 * len(names))), width_ratios=(3, 1), layout="constrained"
    )
    flat = rows.reshape(-1, rows.shape[2])
    image = grid[0].imshow(
        np.vstack((flat, flat.mean(0))).T, cmap=SHADES, vmin=0, aspect="auto", interpolation="nearest"
    )
    heads = [f"{layer}.{head}" for layer in range(rows.shape[0]) for head in range(rows.shape[1])]
    grid[0].set_xticks(range(len(heads) + 1), [*heads, "mean"], rotation=90, fontsize=7)
    _names(grid[0], names, "y")
    figure.colorbar(image, ax=grid[0], label="attention weight")
    bottom = np.zeros(len(figures.shares))
    for column, (name, colour) in enumerate(zip(("user", "history", "itself"), COLOURS, strict=True)):
        grid[1].bar(range(len(bottom)), figures.shares[:, column], bottom=bottom, label=name, color=colour)
        bottom = bottom + figures.shares[:, column]
    grid[1].set(xlabel="layer", ylabel="share, mean over heads and candidates", xticks=range(len(bottom)))
    grid[1].legend(fontsize=8, loc="lower right")
    who = labels.tokens[1 + figures.history + figures.chosen]
    text = (
        f"Left: what candidate {figures.chosen} ({who}) looks at, by head and on average. Right: shares by "
        "layer. Where it looks is not what moved its score: see the changes below."
    )
    return _panel("candidate", "What one candidate looks at", text, figure)


def soft_cap(figures: Figures, labels: Labels) -> Panel:
    """5: logits before and after the cap."""
    layers, columns = len(figures.raw), min(len(figures.raw), 4)
    limit = figures.edges[-1]
    figure, grid = plt.subplots(
        -(-layers // columns),
        columns,
        figsize=(3 * columns, 2.3 * -(-layers // columns)),
        squeeze=False,
        layout="constrained",
    )
    for layer, axes in enumerate(grid.flat[:layers]):
        axes.stairs(figures.raw[layer], figures.edges, label="raw", color=COLOURS[0], fill=True)
        axes.stairs(figures.capped[layer], figures.edges, label="capped", color=COLOURS[1])
        for sign in (-1, 1) if figures.cap else ():
            label = f"the cap, ±{figures.cap:g}" if sign > 0 else None
            axes.axvline(sign * (figures.cap or limit), color="#c0392b", linestyle="--", linewidth=1, label=label)
        axes.set(yscale="symlog", xlim=(-limit, limit), xlabel="attention logit", ylabel="pairs of tokens")
        axes.set_title(f"layer {layer}: {figures.beyond_half[layer]:.2%} beyond half the cap", fontsize=8)
    grid[0, 0].legend(fontsize=7)
    text = (
        "Attention logits of all pairs that see each other, before and after the cap, logarithmic counts; the "
        "outer bins hold what lies beyond. Where the two curves agree the cap does nothing."
    )
    return _panel("soft-cap", "The soft cap at work", text, figure)


def updates(figures: Figures, labels: Labels) -> Panel:
    """6: how much each sub-layer moves the stream."""
    figure, grid = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for column, name in enumerate(("attention", "feed-forward")):
        grid[0].plot(figures.updates[:, column], "o-", label=name, color=COLOURS[1 + column])
    layers = range(len(figures.stream))
    grid[0].set(xlabel="layer", ylabel="update scale", ylim=(0, 1), xticks=layers)
    grid[0].legend()
    grid[1].plot(figures.stream, "o-", color=COLOURS[1])
    grid[1].set(xlabel="layer", ylabel="standard deviation of the stream", xticks=layers)
    text = (
        "Left: sqrt(σr² / (σr² + σs²)) of what a sub-layer adds (r) to the stream (s). A trunk that was never "
        "trained adds nothing: 0 everywhere. Right: the stream before each layer."
    )
    return _panel("updates", "Update scale and stream scale", text, figure)


def leave_one_out(figures: Figures, labels: Labels) -> Panel:
    """7: what moved the score."""
    changes = figures.score_changes
    names = [*labels.tokens[1 : 1 + figures.history], "user"]
    figure, grid = plt.subplots(1, 2, figsize=(14, max(3.5, 0.22 * len(names))), layout="constrained")
    for axes, values, columns, title in (
        (grid[0], changes, labels.tokens[1 + figures.history :], "score, by candidate"),
        (grid[1], figures.changes[:, figures.chosen], labels.actions, f"probabilities of candidate {figures.chosen}"),
    ):
        most = max(float(np.abs(values).max(initial=0)), 1e-12)
        shades = SymLogNorm(most / 100, vmin=-most, vmax=most)  # otherwise two large rows leave the rest blank
        image = axes.imshow(values, cmap=SIGNS, norm=shades, aspect="auto", interpolation="nearest")
        axes.set_title(title, fontsize=9)
        _names(axes, names, "y")
        _names(axes, columns, "x")
        ticks = [sign * most * share for sign, share in ((-1, 1), (-1, 0.1), (1, 0), (1, 0.1), (1, 1))]
        figure.colorbar(image, ax=axes, ticks=ticks, format="%+.2g", label="with it less without it, logarithmic")
    text = (
        "What each event and the user change: the numbers with it less those without it. Blue raises, red "
        "lowers, on a logarithmic scale. Compare with the attention above: an event may get much of it and change little. "
        "Changes one at a time do not add up where events say the same."
    )
    return _panel("changes", "What moved the score", text, figure)


def rope(figures: Figures, labels: Labels) -> Panel | None:
    """8: how distance changes a logit; None for a trunk without RoPE."""
    if figures.rope_logits is None or figures.wavelengths is None:
        return None
    figure, grid = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for head, logits in enumerate(figures.rope_logits):
        grid[0].plot(logits, label=f"head {head}", linewidth=1)
    grid[0].set(xlabel="distance in tokens", ylabel="logit, uncapped")
    grid[0].legend(fontsize=6, ncols=2)
    window = figures.rope_logits.shape[1] - 2
    grid[1].semilogy(figures.wavelengths, ".-", color=COLOURS[1])
    grid[1].axhline(window, color="black", linestyle="--", linewidth=0.8, label=f"the window, {window}")
    grid[1].set(xlabel="pair of components", ylabel="wavelength in tokens")
    grid[1].legend()
    text = (
        "Left: the first layer's logit of one fixed query (the candidate's) and one fixed key (the newest "
        "event's), were they so far apart. Right: pairs below the line turn more than once within the window "
        "and tell near from far; those above hardly turn."
    )
    return _panel("rope", "RoPE: what distance does", text, figure)


def retrieval(figures: RetrievalFigures) -> Panel:
    """9: the corpus around the user."""
    figure, grid = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    for topic in range(-1, len(figures.topic_names)):
        points = figures.posts[figures.topics == topic]
        name = figures.topic_names[topic] if topic >= 0 else None
        grid[0].scatter(*points.T, s=3, label=name, color=plt.get_cmap("tab20")(topic % 20) if name else "#cccccc")
    grid[0].scatter(*figures.near.T, s=18, facecolors="none", edgecolors="black", linewidths=0.5, label="retrieved")
    grid[0].plot(*figures.user, "*", color="#c0392b", markersize=12, label="user")
    grid[0].legend(fontsize=6)
    grid[0].set(title=f"two principal components, {figures.explained:.0%} of the variance", xticks=[], yticks=[])
    grid[1].stairs(figures.counts, figures.edges, fill=True, color=COLOURS[0])
    grid[1].axvline(figures.best_cosines[-1], color="black", linestyle="--", label=f"post {len(figures.best)}")
    grid[1].set(xlabel="cosine with the user", ylabel="posts")
    grid[1].legend()
    grid[2].plot(np.arange(1, len(figures.best) + 1), figures.final_ranks, ".", color=COLOURS[1])
    grid[2].set(xlabel="rank by retrieval", ylabel="rank by the ranker")
    text = (
        "Left: the corpus from the side on which it is widest, and the posts nearest to the user, ringed; "
        "nearness in the plane is not the cosine, which all dimensions make. "
        "Middle: all cosines, and where the search stops. Right: what the ranker makes of the order in which "
        "posts were retrieved; a diagonal would mean that it adds nothing."
    )
    return _panel("retrieval", "Retrieval", text, figure)


def _token_axes(axes: Axes, figures: Figures, labels: Labels) -> None:
    _lines(axes, figures.history + 0.5, both=True)
    axes.set(xlabel="can be looked at", ylabel="asks")
    if len(labels.tokens) <= 40:
        _names(axes, labels.tokens, "x")
        _names(axes, labels.tokens, "y")


def _lines(axes: Axes, start: float, *, both: bool) -> None:
    """Dashed lines where the candidates begin."""
    axes.axvline(start, color="#c0392b", linestyle="--", linewidth=1)
    if both:
        axes.axhline(start, color="#c0392b", linestyle="--", linewidth=1)


def _names(axes: Axes, names: Sequence[str], which: str) -> None:
    short = [name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…" for name in names]
    if which == "x":
        axes.set_xticks(range(len(short)), short, rotation=90, fontsize=6)
    else:
        axes.set_yticks(range(len(short)), short, fontsize=6)


def _panel(name: str, title: str, caption: str, figure: Figure) -> Panel:
    return Panel(name, title, caption, png(figure))
