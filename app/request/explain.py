"""What is wrong with a refused request, as dotted paths and sentences that hold nothing the caller sent.

A rule takes a value and returns its problems as (path below the value, sentence). Rules of objects and arrays are made of the
rules of what they hold, and stop after about ten problems.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.contract import MAX_ACTION_VALUE, MAX_ID, MAX_TIME, MAX_WEIGHT, REPLIES, is_request_id
from app.request.vocabulary import Vocabulary

Problem = tuple[str, str]
Rule = Callable[[Any], Sequence[Problem]]
Rules = Mapping[str, Rule]

REQUIRED = ("user_id", "candidates", "post_id", "author_id", "inputs", "name", "datatype", "shape", "binary_data_size")
MAX_ID_DIGITS = len(str(MAX_ID))
MAX_HINTED_NAME = 32  # a longer unknown name is no typing error, and comparing it costs time
ID_RULE = "must be an unsigned 64-bit integer, as a JSON integer or a decimal string without leading zeros"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
ACTION_RULE = "must name an action of this checkpoint, or be the decimal string of its index"
MAX_TOPICS_WANTED = 1000
MAX_TOPIC_LETTERS = 100
NAMED_TWICE = ("", "names one action twice, by name and by index")


def explain(body: Any, rule: Rule) -> InvalidRequest:
    """The error for a JSON value that breaks the rule of a request."""
    problems = rule(body)
    assert problems, "a request was refused that has nothing wrong with it"
    return InvalidRequest([(path.removeprefix("."), sentence) for path, sentence in problems])


def is_id(value: Any) -> bool:
    """Whether one JSON value is an id."""
    if type(value) is int:
        return 0 <= value <= MAX_ID
    if type(value) is not str or len(value) > MAX_ID_DIGITS or not (value.isascii() and value.isdigit()):
        return False
    return (value[0] != "0" or value == "0") and (len(value) < MAX_ID_DIGITS or int(value) <= MAX_ID)


def request_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request in JSON objects or arrays."""
    candidates = _posts(_post(vocabulary) | {"created_at": integer(0, MAX_TIME)}, least=1)
    reply = fulfils(lambda value: value in REPLIES, f"must be one of {', '.join(REPLIES)}")
    return object_of(_viewer(vocabulary) | {"candidates": candidates, "reply": reply} | _wishes(vocabulary))


def retrieval_rule(vocabularies: Sequence[Vocabulary], *, ranks: bool) -> Rule:
    """Of a request for posts. The history must make sense to every vocabulary, of which the last is the ranker's where it `ranks`."""
    topics = array_of(
        fulfils(lambda name: type(name) is str and len(name) <= MAX_TOPIC_LETTERS, "must be a short text")
    )
    filters: Rules = {
        "k": COUNT,
        "exclude": array_of(fulfils(is_id, ID_RULE)),
        "exclude_history": fulfils(lambda value: type(value) is bool, "must be true or false"),
        "topics": lambda value: topics(value) or _too_many_topics(value),
        "min_score": _number(-1, 1),
        "max_age_seconds": integer(1, MAX_TIME),
    }
    wishes = [_wishes(vocabularies[-1])] if ranks else []

    def problems(value: Any) -> Sequence[Problem]:
        for vocabulary in vocabularies:
            rules = {**_viewer(vocabulary), **filters, **(wishes[0] if wishes else {})}
            if found := object_of(rules)(value):
                return found
        if "max_age_seconds" in value and not value.get("impression_ts"):
            return [(".max_age_seconds", "needs impression_ts, from which ages are counted")]
        return ()

    return problems


def _too_many_topics(value: Sequence[Any]) -> Sequence[Problem]:
    return [("", f"must hold at most {MAX_TOPICS_WANTED} topics")] if len(value) > MAX_TOPICS_WANTED else ()


def _post(vocabulary: Vocabulary) -> dict[str, Rule]:
    return {
        "post_id": fulfils(is_id, ID_RULE),
        "author_id": fulfils(is_id, ID_RULE),
        "product_surface": integer(0, vocabulary.product_surfaces - 1),
    }


def _viewer(vocabulary: Vocabulary) -> dict[str, Rule]:
    """What every request has: who it is for."""
    event = _post(vocabulary) | {"actions": _actions(vocabulary.index), "dwell_time": _number(0, float("inf"))}
    return {
        "user_id": fulfils(is_id, ID_RULE),
        "history": _posts(event, least=0),
        "impression_ts": integer(0, MAX_TIME),
        "request_id": NAME,
    }


def _wishes(vocabulary: Vocabulary) -> dict[str, Rule]:
    """What a request for scores may say about its reply."""
    names = _names(vocabulary.index)
    return {
        "weights": _action_map(vocabulary.index, _number(-MAX_WEIGHT, MAX_WEIGHT)),
        "top_k": COUNT,
        "actions_wanted": lambda value: names(value) or _named_twice(value, vocabulary.index),
    }


def fulfils(is_good: Callable[[Any], bool], sentence: str) -> Rule:
    """Of a value that is good in one way alone."""
    problem = [("", sentence)]
    return lambda value: () if is_good(value) else problem


NAME = fulfils(is_request_id, REQUEST_ID_RULE)
COUNT = fulfils(lambda value: type(value) is int and value >= 1, "must be an integer of at least 1")


def integer_rule(low: int, high: int) -> str:
    """The sentence of an integer in these bounds."""
    return f"must be an integer between {low} and {high}"


def integer(low: int, high: int) -> Rule:
    """Of an integer in these bounds."""
    problem = [("", integer_rule(low, high))]
    return lambda value: () if type(value) is int and low <= value <= high else problem


def number_rule(low: float, high: float) -> str:
    """The sentence of a number in these bounds."""
    return "must be a number " + (f"between {low:g} and {high:g}" if high < float("inf") else f"of at least {low:g}")


def _number(low: float, high: float) -> Rule:
    problem = [("", number_rule(low, high))]
    return lambda value: () if type(value) in (int, float) and low <= value <= high else problem


def object_of(rules: Rules) -> Rule:
    """Of an object whose fields have these rules; those in REQUIRED must be there."""

    def problems(value: Any) -> list[Problem]:
        if type(value) is not dict:
            return [("", "must be a JSON object")]
        found: list[Problem] = []
        if not value.keys() <= rules.keys():
            unknown = islice(value.keys() - rules.keys(), MAX_PROBLEMS)
            found = [("", _unknown_field(name, rules)) for name in unknown]
        for name, rule in rules.items():
            if name in value:
                if below := rule(value[name]):
                    found += [(f".{name}{path}", sentence) for path, sentence in below]
            elif name in REQUIRED:
                found.append((f".{name}", "is required"))
        return found

    return problems


def _unknown_field(name: str, known: Collection[str]) -> str:
    """The unknown name may be anything, so only the nearest known one is shown."""
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_HINTED_NAME else []
    return "has an unknown field" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")


def array_of(rule: Rule, most: int | None = None) -> Rule:
    """Of an array all of whose entries have this rule, and that holds no more than `most`."""

    def problems(value: Any) -> list[Problem]:
        if type(value) is not list:
            return [("", "must be an array")]
        if most is not None and len(value) > most:
            return [("", f"must hold at most {most}")]
        found: list[Problem] = []
        for place, entry in enumerate(value):
            if below := rule(entry):
                found += [(f"[{place}]{path}", sentence) for path, sentence in below]
                if len(found) >= MAX_PROBLEMS:
                    break
        return found

    return problems


def _posts(rules: Rules, least: int) -> Rule:
    objects, arrays = array_of(object_of(rules)), object_of({name: array_of(rule) for name, rule in rules.items()})

    def problems(value: Any) -> Sequence[Problem]:
        if type(value) is list:
            found, count = [*objects(value)], len(value)
        elif type(value) is dict:
            found = [*arrays(value)]
            lengths = {len(column) for column in value.values() if type(column) is list}
            if len(lengths) > 1:
                found.append(("", "must hold arrays of equal length"))
            count = max(lengths, default=0)
        else:
            return [("", "must be a list of objects or one object of equal-length arrays")]
        return found or ([("", "must not be empty")] if count < least else ())

    return problems


def _names(index: Mapping[str, int]) -> Rule:
    return array_of(fulfils(lambda name: type(name) is str and name in index, ACTION_RULE))


def _named_twice(names: Collection[str], index: Mapping[str, int]) -> Sequence[Problem]:
    return [NAMED_TWICE] if len({index[name] for name in names}) < len(names) else ()


def _action_map(index: Mapping[str, int], number: Rule) -> Rule:
    def problems(value: Any) -> Sequence[Problem]:
        if type(value) is not dict:
            return [("", "must be a map of action to number")]
        if not value.keys() <= index.keys():
            return [("", f"every name {ACTION_RULE}")]
        return _named_twice(value, index) or [problem for entry in value.values() for problem in number(entry)]

    return problems


def _actions(index: Mapping[str, int]) -> Rule:
    names, values = _names(index), _action_map(index, _number(0, MAX_ACTION_VALUE))
    neither = [("", "must be a list of names or a map of name to value")]
    return lambda value: names(value) if type(value) is list else values(value) if type(value) is dict else neither
