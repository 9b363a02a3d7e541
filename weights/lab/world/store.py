"""Saves and loads a world: the log, the truth and names. Training reads only the log; evaluation reads everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from weights.format.writer import write_all
from weights.lab.training.log import write_log
from weights.lab.world.names import person_name, topic_name
from weights.lab.world.population import interest
from weights.lab.world.settings import SURFACES
from weights.lab.world.simulate import Truth, World

LOG_NAME = "log.parquet"
TRUTH_NAME = "truth.parquet"
WORLD_NAME = "world.json"
PROBABILITY_PREFIX = "probability."
KEEN = 0.5  # a user likes topics with more appeal than this


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """The facts about a world that evaluation needs: when the test period starts, in Unix seconds, and its truth."""

    test_ts: int
    truth: Truth


def save_world(directory: Path, world: World) -> None:
    """Write `log.parquet`, `truth.parquet` (one row for each row of the log in the test period, same order) and `world.json`: all, or
    none where one cannot be written. Raises OSError, which names the file."""
    truth = world.truth
    columns = {
        PROBABILITY_PREFIX + name: pa.array(truth.probabilities[:, index])
        for index, name in enumerate(world.log.action_names)
    }
    columns |= {name: pa.array(getattr(truth, name)) for name in ("log_dwell", "affinity", "topic")}
    document = {"settings": asdict(world.settings), "test_ts": world.settings.test_ts, **world_names(world)}
    write_all(
        directory,
        {
            LOG_NAME: lambda new: write_log(new, world.log),
            TRUTH_NAME: lambda new: pq.write_table(pa.table(columns), new, compression="zstd"),
            WORLD_NAME: lambda new: new.write_text(json.dumps(document, indent=1) + "\n"),
        },
    )


def world_names(world: World) -> dict[str, Any]:
    """Names by id, for display: surfaces, topics, authors with their topic, users with the topics they like at the end of the world.

    Ids are decimal strings: JavaScript cannot hold them as numbers.
    """
    settings, users = world.settings, world.users
    keen = interest(users.latent, settings) > KEEN
    return {
        "surfaces": list(SURFACES),
        "topics": [topic_name(index) for index in range(settings.topics)],
        "authors": {
            str(author): {"name": person_name(index), "topic": topic_name(int(topic))}
            for index, (author, topic) in enumerate(zip(world.authors.ids, world.authors.topic, strict=True))
        },
        "users": {
            str(user): {
                "name": person_name(settings.authors + index),
                "likes": [topic_name(int(topic)) for topic in np.flatnonzero(keen[index])],
                "new": index >= settings.users,
            }
            for index, user in enumerate(users.ids)
        },
    }


def load_facts(directory: Path, actions: Sequence[str]) -> Facts:
    """Read `truth.parquet` and `world.json`; the probabilities are those of `actions`, in this order.

    Raises OSError or ValueError for files that are absent or not a world's."""
    document = json.loads((directory / WORLD_NAME).read_text())
    table = pq.read_table(directory / TRUTH_NAME)
    names = [PROBABILITY_PREFIX + name for name in actions]
    if missing := set(names) - set(table.column_names):
        raise ValueError(f"{directory / TRUTH_NAME} lacks {min(missing)}")
    further = (table[name].to_numpy() for name in ("log_dwell", "affinity", "topic"))
    truth = Truth(np.stack([table[name].to_numpy() for name in names], 1), *further)
    return Facts(int(document["test_ts"]), truth)
