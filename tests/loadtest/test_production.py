"""The production shape: the default limits admit it whole, on both wires, with the bits of each candidate alone."""

from __future__ import annotations

import orjson
import pytest

from loadtest.bench.production import ask, bits_row, rows_of
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.servers.launch import ranking_server


def test_nothing_is_dropped_and_no_bit_depends_on_the_others_or_on_the_wire() -> None:
    with ranking_server(threads=1) as server:
        rows = list(rows_of("demo", server, 1))
        counted = [row for row in rows if row.limit == 0]  # the others compare speeds
        assert [row.ok for row in counted] == [True, True], counted
        assert len(rows) == 9  # memory, bits, dropped; of each wire cold and cached and the share
        first, other = (orjson.loads(page.body) for page in Traffic(TrafficSettings.production()).take(2))
        assert (len(first["history"]["post_id"]), len(first["candidates"]["post_id"])) == (1022, 2800)
        whole = ask(server, first, "columns")
        control = bits_row("control", server, first | {"history": other["history"], "user_id": other["user_id"]}, whole)
        assert control.figure > 2800, "another context has other bits, in binary and alone"
        assert not control.ok
        with pytest.raises(RuntimeError, match="answered 413"):
            ask(
                server,
                first | {"candidates": {name: column * 2 for name, column in first["candidates"].items()}},
                "columns",
            )


def test_a_fixed_number_of_candidates_is_sent_though_it_is_above_the_usual_most() -> None:
    (page,) = Traffic(TrafficSettings(objects_share=1.0).with_fixed_candidates(600)).take(1)
    assert len(orjson.loads(page.body)["candidates"]) == 600
