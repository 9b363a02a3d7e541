"""Whether a value keeps to the JSON Schema in `/openapi.json`: a second reading of a request's declaration. Not a test itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from app.request.replies import SCHEMAS, ExplainReply
from app.request.schema import ExplainRequest, RankRequest, RecommendRequest, RetrieveRequest, published

MODELS = (RankRequest, ExplainRequest, RetrieveRequest, RecommendRequest, ExplainReply)


@cache
def _validator(model: type) -> Any:
    plain = jsonschema.Draft202012Validator
    types = plain.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # else 1.0 is one
    strict = jsonschema.validators.extend(plain, type_checker=types)
    refs, components = published(MODELS, f"{SCHEMAS}/{{name}}")
    return strict({**refs[MODELS.index(model)], "components": {"schemas": components}})


def keeps(model: type, value: Any) -> bool:
    """As the schema says, and what a JSON Schema cannot say: columns are equally long, and an id in digits fits 64 bits."""
    return _validator(model).is_valid(value) and _fits(value)


def _fits(value: dict[str, Any]) -> bool:
    for posts in (value.get("history", []), value.get("candidates", [])):
        if isinstance(posts, dict) and len(set(map(len, posts.values()))) > 1:
            return False
    candidates = value.get("candidates")
    if isinstance(candidates, dict) and not candidates["post_id"]:
        return False
    if not all(_is_id(id_) for id_ in _ids(value)):
        return False
    if not candidates:
        return True
    posts = candidates["post_id"] if isinstance(candidates, dict) else [post["post_id"] for post in candidates]
    return set(map(int, value.get("explain", []))) <= set(map(int, posts))


def _ids(value: dict[str, Any]) -> list[Any]:
    found = [value.get("user_id", 0), *value.get("exclude", []), *value.get("explain", [])]
    for posts in (value.get("history", []), value.get("candidates", [])):
        for name in ("post_id", "author_id"):
            found += posts[name] if isinstance(posts, dict) else [post[name] for post in posts]
    return found


def _is_id(value: int | str) -> bool:
    return str(value).isascii() and str(value).isdigit() and str(value) == str(int(value)) and int(value) < 2**64
