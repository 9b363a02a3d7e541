"""Content codes over HTTP, with a ranker and towers that read them: every form of a request, corpora, changes of posts, /recommend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from phoenix_ranker_client.messages import Candidate as ClientCandidate
from phoenix_ranker_client.messages import Event, RankingRequest, RetrievalRequest
from phoenix_ranker_client.messages import Retrieval as ClientRetrieval
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Retrieval, Settings
from loadtest.server import free_port, serving, wait_until
from tests.support.asgi import ADDRESS
from tests.support.random_models import retrieval_config
from tests.support.redis import RedisServer
from tests.weights.call import call
from weights.actions import DWELL_TIME, STANDARD_ACTIONS, default_score_weights
from weights.corpus.store import load_corpus
from weights.format.writer import Labels, write_checkpoint
from weights.synthetic.random_weights import mini_config, random_pieces

LEVELS, VALUES, POSTS = 3, 16, 40
CODES = [5, 16, 1]
NOW = 1_780_000_000
RULE = f"must be a list of {LEVELS} content codes, integers between 0 (none) and {VALUES}, or an empty list"
ANY_RULE = "must be a list of at most 64 content codes, integers between 0 (none) and 1048576"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker and towers with codes, one ranker without, and a corpus with the codes of half of its posts."""
    root = tmp_path_factory.mktemp("codes")
    small: dict[str, Any] = {"width": 32, "layers": 1, "query_heads": 2, "kv_heads": 1, "head_width": 16}
    config = replace(mini_config(1, (50, 60, 40), continuous_actions=1), **small, history_length=8)
    coded = replace(config, code_levels=LEVELS, code_values=VALUES)
    labels = Labels("r", STANDARD_ACTIONS, (DWELL_TIME,), default_score_weights(STANDARD_ACTIONS))
    write_checkpoint(root / "ranker", coded, random_pieces(coded, 1), labels)
    write_checkpoint(root / "plain", config, random_pieces(config, 1), labels)
    towers = retrieval_config(coded)
    write_checkpoint(root / "towers", towers, random_pieces(towers, 2), Labels("t", STANDARD_ACTIONS, (), {}))
    rng = np.random.default_rng(1)
    codes = rng.integers(1, VALUES + 1, (POSTS, LEVELS)).tolist()
    rows = [
        {
            "post_ids": post + 1,
            "author_ids": post % 7 + 1,
            "created_at": NOW - 60 * post,
            "codes": codes[post] * (post % 2),
        }
        for post in range(POSTS)
    ]
    (root / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = call("corpus", "build", root / "posts.jsonl", "--encoder", root / "towers", "--out", root / "corpus")
    assert made.exit_code == 0, made.output
    return root


def settings_of(root: Path, checkpoint: str = "ranker", **further: Any) -> Settings:
    retrieval = Retrieval(checkpoint=root / "towers", corpus=root / "corpus")
    return Settings(checkpoint=root / checkpoint, threads=1, dtype="float32", retrieval=retrieval, **further)


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(create_app(settings_of(root)), base_url=ADDRESS) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


def body(**changes: Any) -> dict[str, Any]:
    """A request whose posts have codes."""
    history = [{"post_id": 90, "author_id": 7, "actions": ["favorite"], "codes": CODES}]
    candidates = [{"post_id": 91 + place, "author_id": 7, "codes": CODES} for place in range(3)]
    return {"user_id": 3, "history": history, "candidates": candidates, "impression_ts": NOW} | changes


def scores(client: Any, asked: dict[str, Any]) -> list[float]:
    reply = client.post("/rank", json=asked)
    assert reply.status_code == 200, reply.text
    return [row["score"] for row in reply.json()["candidates"]]


def without(posts: list[dict[str, Any]], codes: list[int] | None = None) -> list[dict[str, Any]]:
    """The posts without codes, or with these in their place."""
    rest = [{name: value for name, value in post.items() if name != "codes"} for post in posts]
    return rest if codes is None else [post | {"codes": codes} for post in rest]


def test_codes_of_candidates_and_of_the_history_move_scores(client: TestClient) -> None:
    asked = body()
    base = scores(client, asked)
    for field in ("candidates", "history"):
        none = scores(client, asked | {field: without(asked[field])})
        other = scores(client, asked | {field: without(asked[field], [5, 16, 2])})
        assert len({base[0], none[0], other[0]}) == 3, field


def test_an_absent_list_an_empty_one_and_zeros_are_the_same(client: TestClient) -> None:
    asked = body()
    forms = [
        scores(client, asked | {field: without(asked[field], codes) for field in ("history", "candidates")})
        for codes in (None, [], [0, 0, 0])
    ]
    assert forms[0] == forms[1] == forms[2]


def test_one_candidate_has_the_same_bits_alone_and_among_others(client: TestClient) -> None:
    asked = body()
    mixed = [*asked["candidates"], *without(asked["candidates"]), *without(asked["candidates"], [1, 0, 16])]
    together = scores(client, asked | {"candidates": mixed})
    assert [scores(client, asked | {"candidates": [post]})[0] for post in mixed] == together
    assert scores(client, asked | {"candidates": mixed[::-1]}) == together[::-1]


def test_the_client_sends_and_gets_codes(client: TestClient) -> None:
    event = Event(90, 7, ["favorite"], codes=CODES)
    posts = [ClientCandidate(91 + place, 7, codes=CODES) for place in range(3)]
    sent = RankingRequest(3, posts, [event], impression_ts=NOW).to_json()
    assert scores(client, sent) == scores(client, body())
    plain = RankingRequest(3, [ClientCandidate(91, 7)], [Event(90, 7)]).to_json()
    assert not {"codes"} & {*plain["candidates"], *plain["history"]}
    found = ClientRetrieval.from_json(
        client.post("/retrieve", json=RetrievalRequest(3, [event], k=POSTS).to_json()).json()
    )
    assert {len(post.codes) for post in found.posts} == {LEVELS}


def test_features_and_tensors_give_the_bits_of_objects(client: TestClient) -> None:
    asked = body()
    columns = {
        field: {name: [post[name] for post in asked[field]] for name in asked[field][0]}
        for field in ("history", "candidates")
    }
    assert scores(client, asked | columns) == scores(client, asked)
    inputs = [
        tensor("user_id", "UINT64", [1], [3]),
        *(
            tensor(f"candidates.{name}", "UINT64", [3], columns["candidates"][name])
            for name in ("post_id", "author_id")
        ),
        *(tensor(f"history.{name}", "UINT64", [1], columns["history"][name]) for name in ("post_id", "author_id")),
        tensor("history.actions", "UINT64", [1], [1]),
        tensor("history.codes", "INT64", [1, LEVELS], [CODES]),
        tensor("candidates.codes", "INT64", [3, LEVELS], [CODES] * 3),
    ]
    name = client.get("/info").json()["model"]["name"]
    reply = client.post(f"/v2/models/{name}/infer", json={"inputs": inputs, "parameters": {"impression_ts": NOW}})
    assert reply.status_code == 200, reply.text
    (score,) = (output for output in reply.json()["outputs"] if output["name"] == "score")
    assert score["data"] == scores(client, asked)
    described = {each["name"]: each["shape"] for each in client.get(f"/v2/models/{name}").json()["inputs"]}
    assert (described["candidates.codes"], described["history.codes"]) == ([-1, LEVELS], [-1, LEVELS])


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def test_a_longer_history_and_a_handle_keep_their_codes(client: TestClient) -> None:
    events = [{"post_id": 100 + place, "author_id": 7, "codes": [place % 16, 1, 2]} for place in range(11)]
    whole = body(history=events)
    handle = client.post("/rank", json=whole).headers["x-context"]
    named = {name: value for name, value in whole.items() if name not in ("user_id", "history")} | {"context": handle}
    assert scores(client, named) == scores(client, whole) == scores(client, whole | {"history": events[3:]})


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([1, 2], RULE), ([1, 2, 3, 4], RULE), ([1, 2, 17], RULE), ([1, 2, -1], RULE), ([1, 2, 2**70], None),
        ([1, 2, 2.5], None), ([1, 2, "3"], None), ("1,2,3", None), (7, None), (None, None),
    ],
)  # fmt: skip
def test_codes_that_the_checkpoint_does_not_have_are_refused(client: TestClient, codes: Any, message: str) -> None:
    for field in ("candidates", "history"):
        asked = body()
        asked[field] = [*asked[field], asked[field][0] | {"codes": codes}]
        place = len(asked[field]) - 1
        columns = asked | {field: {"post_id": [1, 2], "author_id": [1, 2], "codes": [CODES, codes]}}
        for sent, path in ((asked, f"{field}[{place}].codes"), (columns, f"{field}.codes[1]")):
            reply = client.post("/rank", json=sent)
            (error,) = reply.json()["errors"]
            assert reply.status_code == 422
            assert error["field"].startswith(path)
            assert message is None or error["message"] == message


@pytest.mark.parametrize(
    ("shape", "data", "field"),
    [
        ([3, 2], [1] * 6, "candidates.codes"),
        ([3], [1] * 3, "candidates.codes"),
        ([2, LEVELS], [1] * 6, "candidates.codes"),
        ([3, LEVELS], [1] * 8 + [17], "candidates.codes[2]"),
        ([3, LEVELS], [-1] + [1] * 8, "candidates.codes[0]"),
    ],
)
def test_a_tensor_of_other_codes_is_refused(client: TestClient, shape: list[int], data: list[int], field: str) -> None:
    posts = [tensor(f"candidates.{name}", "UINT64", [3], [1, 2, 3]) for name in ("post_id", "author_id")]
    inputs = [tensor("user_id", "UINT64", [1], [3]), *posts, tensor("candidates.codes", "INT64", shape, data)]
    reply = client.post("/v2/models/r/infer", json={"inputs": inputs})
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, field)


def test_a_checkpoint_without_codes_checks_and_ignores_them(root: Path) -> None:
    with TestClient(create_app(settings_of(root, "plain")), base_url=ADDRESS) as client:
        while client.get("/readyz").status_code != 200:
            pass
        asked = body()
        plain = asked | {field: without(asked[field]) for field in ("history", "candidates")}
        assert scores(client, asked) == scores(client, plain)
        for codes in ([-1], [2**20 + 1], [1] * 65):
            reply = client.post("/rank", json=asked | {"candidates": without(asked["candidates"], codes)})
            assert (reply.status_code, reply.json()["errors"][0]["message"]) == (422, ANY_RULE)
        posts = [tensor(f"candidates.{name}", "UINT64", [3], [91, 92, 93]) for name in ("post_id", "author_id")]
        inputs = [tensor("user_id", "UINT64", [1], [3]), *posts]
        codes = tensor("candidates.codes", "INT64", [3, 5], [7] * 15)
        replies = [client.post("/v2/models/r/infer", json={"inputs": each}) for each in (inputs, [*inputs, codes])]
        assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
        outputs = [reply.json()["outputs"] for reply in replies]
        assert outputs[0] == outputs[1]
        assert "candidates.codes" not in {each["name"] for each in client.get("/v2/models/r").json()["inputs"]}
        search = {"user_id": 3, "history": asked["history"], "k": POSTS}
        assert len(client.post("/recommend", json=search).json()["candidates"]) == POSTS


def recommended(client: Any, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The posts of /recommend, and those of /retrieve, ranked by /rank with the codes that it tells."""
    viewer = {name: value for name, value in body(**changes).items() if name != "candidates"}
    joined = client.post("/recommend", json=viewer | {"k": 1000})
    posts = client.post("/retrieve", json=viewer | {"k": 1000}).json()["posts"]
    assert joined.status_code == 200, joined.text
    kept = ("post_id", "author_id", "created_at", "codes")
    candidates = [{name: post[name] for name in kept} for post in posts]
    ranked = client.post("/rank", json=viewer | {"candidates": candidates, "top_k": len(posts)}).json()["candidates"]
    return [{"post_id": row["post_id"], "score": row["score"]} for row in joined.json()["candidates"]], [
        {"post_id": row["post_id"], "score": row["score"]} for row in ranked
    ]


def test_recommend_ranks_with_the_codes_of_the_corpus(client: TestClient) -> None:
    joined, ranked = recommended(client)
    assert joined == ranked
    assert len(joined) == POSTS
    viewer = {name: value for name, value in body().items() if name != "candidates"} | {"k": POSTS}
    codes = {int(post["post_id"]): post["codes"] for post in client.post("/retrieve", json=viewer).json()["posts"]}
    assert sorted(post for post, each in codes.items() if any(each)) == list(range(2, POSTS + 1, 2))


def test_codes_are_part_of_a_posts_vector_and_are_checked(client: TestClient, root: Path, tmp_path: Path) -> None:
    verified = call("corpus", "verify", root / "corpus", "--encoder", root / "towers")
    assert verified.exit_code == 0, verified.output
    found = {}
    for name, codes in {"none": [], "some": CODES, "others": [1, 2, 3], "bad": [1, 2, 17]}.items():
        posts = tmp_path / f"{name}.jsonl"
        posts.write_text(json.dumps({"post_ids": 5, "author_ids": 1, "codes": codes}) + "\n")
        made = call("corpus", "build", posts, "--encoder", root / "towers", "--out", tmp_path / name)
        if name == "bad":
            assert (made.exit_code, RULE in made.output) == (1, True), made.output
        else:
            assert made.exit_code == 0, made.output
            found[name] = load_corpus(tmp_path / name).corpus.vectors.tobytes()
    assert len(set(found.values())) == 3


@pytest.mark.slow
def test_changed_posts_keep_their_codes_on_disk(root: Path, tmp_path: Path) -> None:
    """A change is searched and ranked with its codes at once, after a restart, and in a snapshot."""
    made = call("corpus", "build", root / "posts.jsonl", "--encoder", root / "towers", "--out", tmp_path / "corpus")
    assert made.exit_code == 0, made.output
    settings: dict[str, Any] = {
        "checkpoint": root / "ranker", "threads": 1, "dtype": "float32", "retrieval__checkpoint": root / "towers",
        "retrieval__corpus": tmp_path / "corpus", "admin__token_sha256": hashlib.sha256(b"token").hexdigest(),
    }  # fmt: skip
    seen = []
    for run in range(2):
        port = free_port()
        with serving(**settings, port=free_port(), admin__port=port) as server, httpx.Client(timeout=60) as admin:
            if not run:
                upsert = [
                    {"post_id": 500, "author_id": 3, "created_at": NOW, "codes": CODES},
                    {"post_id": 501, "author_id": 3, "created_at": NOW},
                ]
                headers = {"authorization": "Bearer token"}
                for bad in ([-1], [2**20 + 1], [1] * 65):
                    reply = admin.post(
                        f"http://127.0.0.1:{port}/admin/posts",
                        json={"upsert": [upsert[0] | {"codes": bad}]},
                        headers=headers,
                    )
                    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, "upsert[0].codes")
                reply = admin.post(f"http://127.0.0.1:{port}/admin/posts", json={"upsert": upsert}, headers=headers)
                assert reply.status_code == 200, reply.text
            with httpx.Client(base_url=server.url, timeout=60) as client:
                joined, ranked = recommended(client)
                assert joined == ranked
                viewer = {name: value for name, value in body().items() if name != "candidates"} | {"k": 1000}
                posts = {post["post_id"]: post for post in client.post("/retrieve", json=viewer).json()["posts"]}
                assert (posts["500"]["codes"], posts["501"]["codes"]) == (CODES, [0, 0, 0])
                seen.append((joined, posts["500"]["score"]))
    assert seen[0] == seen[1]
    copied = call("corpus", "snapshot", tmp_path / "corpus", "--out", tmp_path / "copy")
    assert copied.exit_code == 0, copied.output
    verified = call("corpus", "verify", tmp_path / "copy", "--encoder", root / "towers")
    assert verified.exit_code == 0, verified.output
    with (
        serving(
            **settings | {"retrieval__corpus": tmp_path / "copy"}, port=free_port(), admin__port=free_port()
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert sorted(recommended(client)[0], key=str) == sorted(seen[0][0], key=str)


@pytest.mark.slow
@pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")
def test_codes_come_with_the_feed_of_posts(root: Path, tmp_path: Path) -> None:
    """A post of the feed is found and ranked with its codes, before and after a restart; bad codes stop only their own entry."""
    made = call("corpus", "build", root / "posts.jsonl", "--encoder", root / "towers", "--out", tmp_path / "corpus")
    assert made.exit_code == 0, made.output
    viewer = {name: value for name, value in body().items() if name != "candidates"} | {"k": 1000}
    with RedisServer(tmp_path / "redis") as redis:
        settings: dict[str, Any] = {
            "checkpoint": root / "ranker", "threads": 1, "dtype": "float32", "retrieval__checkpoint": root / "towers",
            "retrieval__corpus": tmp_path / "corpus", "retrieval__feed": redis.address(),
        }  # fmt: skip
        entries = [
            {"upsert": [{"post_id": 500, "author_id": 3, "codes": CODES}, {"post_id": 501, "author_id": 3}]},
            {"upsert": [{"post_id": 502, "author_id": 3, "codes": [-1]}]},
            {"upsert": [{"post_id": 503, "author_id": 3, "codes": [1, 2, VALUES]}]},
        ]
        for entry in entries:
            redis.client().xadd("posts", {"change": json.dumps(entry)})
        replies = []
        for _ in range(2):
            with (
                serving(**settings, port=free_port()) as server,
                httpx.Client(base_url=server.url, timeout=60) as client,
            ):

                def posts(client: httpx.Client = client) -> dict[str, dict[str, Any]]:
                    return {post["post_id"]: post for post in client.post("/retrieve", json=viewer).json()["posts"]}

                wait_until(lambda: "503" in posts())
                assert [posts()[post]["codes"] for post in ("500", "501", "503")] == [CODES, [0] * 3, [1, 2, VALUES]]
                assert "502" not in posts()
                assert len({posts()[post]["score"] for post in ("500", "501", "503")}) == 3
                joined, ranked = recommended(client)
                assert joined == ranked
                replies.append(joined)
        assert replies[0] == replies[1]
        (unreadable,) = redis.client().xrange("posts:unreadable")
        assert b"codes" in unreadable[1][b"reason"]
