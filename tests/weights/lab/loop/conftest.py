"""The nights of a small world and the checkpoint that serves at first, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.weights.lab.loop.nights import Nights


@pytest.fixture(scope="session")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    pytest.importorskip("duckdb")
    from tests.weights.lab.loop.nights import make_nights

    return make_nights(tmp_path_factory.mktemp("nights"))
