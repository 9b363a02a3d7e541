"""Contexts as served: the histories that the model read, from the directory `contexts` beside a log's `impressions`.

They are the histories of those requests whose rows name them by `context_id`. The histories of other requests are reconstructed from rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from model.bounds import LARGEST
from model.config import ModelConfig
from model.inputs import Context, codes_fitting
from weights.lab.training.columns import Columns, Growing, InMemory
from weights.table_files import Table, has_directory, open_table, tables_of
from weights.tables import CODES, Check, Place, TableError, column_of, rows_of_lists
from weights.turns import CONTEXTS
from weights.values import Problem, problem_of_actions, problem_of_codes, problem_of_dwells, problem_of_surfaces

ACTION_PREFIX = "action."
LISTS = {
    "post_ids": pa.uint64(),
    "author_ids": pa.uint64(),
    "product_surfaces": pa.int64(),
    "dwell_seconds": pa.float32(),
}
"""The columns of `contexts` beside `context_id`: lists over the events of a history, oldest first. The value of each action is one more,
`action.NAME`, float32."""
CHECKS: dict[str, Check] = {
    "product_surfaces": partial(problem_of_surfaces, surfaces=LARGEST["product_surfaces"]),
    "dwell_seconds": problem_of_dwells,
}
PIECE_CONTEXTS = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class ServedContexts:
    """K histories with E events together. `ids` uint64 `[K]`, sorted; the events of history k are `starts[k] … stops[k] - 1`, int64 `[K]`.

    `post_ids`, `author_ids` uint64, `product_surfaces` int64, `dwell_seconds` float32 `[E]`; `actions` float32 `[E, A]`, the values of the
    actions in the order of the log's. `codes` int64 `[E, q]`, the content codes, 0 for none.
    """

    ids: NDArray[np.uint64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    post_ids: NDArray[np.uint64]
    author_ids: NDArray[np.uint64]
    product_surfaces: NDArray[np.int64]
    dwell_seconds: NDArray[np.float32]
    actions: NDArray[np.float32]
    codes: NDArray[np.int64]
    order: Sequence[int] | None = None
    """The places in `actions` of a checkpoint's actions; None: all, as they are."""

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, context_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The place k of each of these histories, int64 `[n]`; -1 for an id of 0, which is none."""
        place = np.minimum(np.searchsorted(self.ids, context_ids), max(len(self) - 1, 0))
        return np.where(context_ids == 0, -1, place)

    def context(self, place: int, user_id: int, config: ModelConfig, is_kept: bool = True) -> Context:
        """History `place` of a user, at most as many of its newest events as the model reads, with codes that the model has."""
        first, stop = int(self.starts[place]), int(self.stops[place])
        window = slice(max(first, stop - config.history_length), stop)
        actions = self.actions[window] if self.order is None else self.actions[window][:, self.order]
        return Context(
            user_id,
            self.post_ids[window],
            self.author_ids[window],
            np.ascontiguousarray(actions),
            self.product_surfaces[window],
            self.dwell_seconds[window],
            is_kept,
            codes=codes_fitting(self.codes[window], stop - window.start, config),
        )

    def with_actions(self, order: Sequence[int]) -> ServedContexts:
        """The same histories with the actions at these places of the present ones."""
        return replace(self, order=order if self.order is None else [self.order[place] for place in order])

    def check(self, context_ids: NDArray[np.uint64], request_ids: NDArray[np.uint64], where: str) -> None:
        """Raises TableError for a request whose context is not here. `[n]` both."""
        missing = (context_ids != 0) & ~np.isin(context_ids, self.ids)
        if missing.any():
            row = int(missing.argmax())
            raise TableError(
                f"{where}: request {request_ids[row]} has the context_id {context_ids[row]}, which {CONTEXTS} does not have"
            )


def open_contexts(path: Path | str) -> Table | None:
    """The contexts of a log for reading in pieces; None if it has none. Raises TableError."""
    if not has_directory(path, CONTEXTS):
        return None
    kinds = {"context_id": pa.uint64(), "post_ids": pa.list_(pa.uint64()), "author_ids": pa.list_(pa.uint64())}
    return open_table(f"{str(path).rstrip('/')}/{CONTEXTS}", kinds)


def read_contexts(source: Table, action_names: tuple[str, ...]) -> ServedContexts:
    """Read the contexts of a log with these actions into memory. Raises TableError."""
    growing = InMemory()
    append_contexts(source, action_names, growing)
    return served_contexts(growing.columns())


def append_contexts(source: Table, action_names: tuple[str, ...], growing: Growing) -> None:
    """Check contexts and append their columns: `ids`, `lengths`, and those of the events. Raises TableError, which names the row."""
    needed = {"context_id", *LISTS, *(ACTION_PREFIX + name for name in action_names)}
    if missing := sorted(needed - set(source.schema.names)):
        raise TableError(f"{source.files[0]} lacks the column {missing[0]}, which contexts as served have")
    if further := sorted(set(source.schema.names) - needed - {CODES}):
        raise TableError(f"{source.files[0]} has the column {further[0]}, which the impressions do not have")
    empty: Columns = {name: pa.array([], kind).to_numpy() for name, kind in LISTS.items()}
    growing.append(
        {"ids": np.zeros(0, np.uint64), "lengths": np.zeros(0, np.int64)}
        | empty
        | {"actions": np.zeros((0, len(action_names)), np.float32)}
    )
    levels = 0
    if CODES in source.schema.names:
        pieces = tables_of(source, PIECE_CONTEXTS, [CODES])
        levels = max((_codes(table, source.files[0]).shape[1] for table, _ in pieces), default=0)
    for table, place in tables_of(source, PIECE_CONTEXTS):
        columns = _checked(table, place, action_names)
        codes = np.zeros((len(columns["post_ids"]), 0), np.int64)
        if levels:
            lengths = pc.fill_null(pc.list_value_length(table.column(CODES)), 0).to_numpy()
            if (differ := lengths != columns["lengths"]).any():
                raise TableError(f"{place(int(differ.argmax()))}: {CODES} is not as long as {next(iter(LISTS))}")
            codes = _codes(table, source.files[0], levels)
        growing.append(columns | {CODES: codes})


def _codes(table: pa.Table, where: str, levels: int = 0) -> NDArray[np.int64]:
    """The content codes of the events, one history after the other, int64 `[e, q]`, q at least `levels`. Raises TableError."""
    column = table.column(CODES).combine_chunks()
    if not pa.types.is_list(column.type):
        raise TableError(f"{where}: {CODES} must be a list of lists of integers")
    codes = rows_of_lists(pa.table({CODES: column.flatten()}), where, levels)
    if problem := problem_of_codes(codes):
        raise TableError(f"{where}: {CODES} {problem[1]}")
    return codes


def served_contexts(columns: Columns) -> ServedContexts:
    """Contexts from the columns that `append_contexts` appended. Raises TableError for two of one id."""
    ids, stops = columns["ids"], np.cumsum(columns["lengths"])
    order = np.argsort(ids, kind="stable")
    if (same := ids[order][1:] == ids[order][:-1]).any():
        raise TableError(f"{CONTEXTS}: two contexts have the context_id {ids[order][int(same.argmax())]}")
    events: dict[str, Any] = {name: columns[name] for name in (*LISTS, "actions")}
    events[CODES] = columns.get(CODES, np.zeros((len(events["actions"]), 0), np.int64))
    return ServedContexts(ids[order], (stops - columns["lengths"])[order], stops[order], **events)


def _checked(table: pa.Table, place: Place, action_names: tuple[str, ...]) -> Columns:
    """The columns of a piece of the contexts. Raises TableError."""
    ids: NDArray[np.uint64] = column_of(table, "context_id", pa.uint64(), place)
    if (ids == 0).any():
        raise TableError(f"{place(int((ids == 0).argmax()))}: context_id must not be 0")
    lengths: NDArray[np.int64] | None = None
    events: Columns = {}
    for name, flat, sizes in _lists(table, action_names, place):
        if lengths is None:
            lengths = sizes
        elif (differ := sizes != lengths).any():
            raise TableError(f"{place(int(differ.argmax()))}: {name} is not as long as {next(iter(LISTS))}")
        events[name] = flat
        check: Check | None = problem_of_actions if name.startswith(ACTION_PREFIX) else CHECKS.get(name)
        problem: Problem | None = check(flat) if check else None
        if problem:
            row = int(np.searchsorted(np.cumsum(sizes), problem[0], "right"))
            raise TableError(f"{place(row)}: {name} {problem[1]}")
    assert lengths is not None
    actions = np.stack([events.pop(ACTION_PREFIX + name) for name in action_names], 1)
    return {"ids": ids, "lengths": lengths, **events, "actions": actions}


def _lists(
    table: pa.Table, action_names: tuple[str, ...], place: Place
) -> Iterator[tuple[str, NDArray[Any], NDArray[np.int64]]]:
    """Each column of lists: its name, its elements one list after the other, and the length of each list."""
    kinds = LISTS | {ACTION_PREFIX + name: pa.float32() for name in action_names}
    for name, kind in kinds.items():
        column = table.column(name).combine_chunks()
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise TableError(f"{place(row)}: {name} is null; write an empty list for no history")
        try:
            flat = column.flatten()
            if flat.null_count:
                raise TableError(f"{place(0)} or below: {name} has a null within a list")
            if kind == pa.uint64() and pa.types.is_floating(flat.type):
                raise TableError(f"{place(0)} or below: {name} holds {flat.type}: a float cannot hold every id")
            yield name, flat.cast(kind).to_numpy(), pc.list_value_length(column).cast(pa.int64()).to_numpy()
        except (pa.ArrowException, AttributeError) as error:
            raise TableError(f"{place(0)} or below: {name} must be a list of {kind} ({error})") from error
