"""What is wrong with a refused request, as dotted paths and sentences that hold nothing the caller sent.

Values are checked in blocks, all of a block at once; a block that is not right is cut into smaller ones, down to single values.
So a long request with a few faults costs little more than one without. Looking stops after about ten problems.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.bounds import MAX_ACTION_VALUE, MAX_ID, MAX_TIME, MAX_WEIGHT, REPLIES, is_request_id
from app.request.ids import are_ids
from app.request.vocabulary import Vocabulary

Problem = tuple[str, str]
Problems = Callable[[Any], Sequence[Problem]]  # (path below the value, sentence)


class Rule(NamedTuple):
    """What a value must be, said twice: whether all of several values are right, fast, and what is wrong with one."""

    fit: Callable[[Sequence[Any]], bool]
    problems: Problems


Rules = Mapping[str, Rule]

REQUIRED = (
    "user_id",
    "candidates",
    "explain",
    "post_id",
    "author_id",
    "inputs",
    "name",
    "datatype",
    "shape",
    "binary_data_size",
)
BLOCKS = (256, 16, 1)
MAX_HINTED_NAME = 32  # a longer unknown name is no typing error, and comparing it costs time
ID_RULE = "must be an unsigned 64-bit integer, as a JSON integer or a decimal string without leading zeros"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
ACTION_RULE = "must name an action of this checkpoint, or be the decimal string of its index"
MAX_TOPICS_WANTED = 1000
MAX_TOPIC_LETTERS = 100
NAMED_TWICE = ("", "names one action twice, by name and by index")


def explain(body: Any, rule: Rule) -> InvalidRequest:
    """The error for a JSON value that breaks the rule of a request."""
    problems = rule.problems(body)
    assert problems, "a request was refused that has nothing wrong with it"
    return InvalidRequest([(path.removeprefix("."), sentence) for path, sentence in problems])


def request_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request in JSON objects or arrays."""
    return object_of(_request(vocabulary))


def explanation_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request for an explanation: those to explain must be among the candidates."""
    ids = array_of(_rule(are_ids, ID_RULE))
    one_or_more = _once(lambda value: ids.problems(value) or ([] if value else [("", "must not be empty")]))
    request = object_of({**_request(vocabulary), "explain": one_or_more})

    def problems(value: Any) -> Sequence[Problem]:
        if found := request.problems(value):
            return found
        candidates = value["candidates"]
        posts = candidates["post_id"] if type(candidates) is dict else [post["post_id"] for post in candidates]
        known = set(map(int, posts))
        unknown = (place for place, post in enumerate(value["explain"]) if int(post) not in known)
        return [(f".explain[{place}]", "must be the post_id of a candidate") for place in islice(unknown, MAX_PROBLEMS)]

    return _once(problems)


def _request(vocabulary: Vocabulary) -> Rules:
    candidates = _once(_posts(_post(vocabulary) | {"created_at": integer(0, MAX_TIME)}, least=1))
    reply = fulfils(lambda value: value in REPLIES, f"must be one of {', '.join(REPLIES)}")
    return _viewer(vocabulary) | {"candidates": candidates, "reply": reply} | _wishes(vocabulary)


def retrieval_rule(vocabularies: Sequence[Vocabulary], *, ranks: bool) -> Rule:
    """Of a request for posts. The history must make sense to every vocabulary, of which the last is the ranker's where it `ranks`."""
    topic = fulfils(lambda name: type(name) is str and len(name) <= MAX_TOPIC_LETTERS, "must be a short text")
    filters: Rules = {
        "k": COUNT,
        "exclude": array_of(_rule(are_ids, ID_RULE)),
        "exclude_history": fulfils(lambda value: type(value) is bool, "must be true or false"),
        "topics": array_of(topic, MAX_TOPICS_WANTED),
        "min_score": _number(-1, 1),
        "max_age_seconds": integer(1, MAX_TIME),
    }
    wishes = _wishes(vocabularies[-1]) if ranks else {}
    rules = [object_of({**_viewer(vocabulary), **filters, **wishes}) for vocabulary in vocabularies]

    def problems(value: Any) -> Sequence[Problem]:
        for rule in rules:
            if found := rule.problems(value):
                return found
        if "max_age_seconds" in value and not value.get("impression_ts"):
            return [(".max_age_seconds", "needs impression_ts, from which ages are counted")]
        return ()

    return _once(problems)


def _post(vocabulary: Vocabulary) -> dict[str, Rule]:
    ids = _rule(are_ids, ID_RULE)
    return {"post_id": ids, "author_id": ids, "product_surface": integer(0, vocabulary.product_surfaces - 1)}


def _viewer(vocabulary: Vocabulary) -> dict[str, Rule]:
    """What every request has: who it is for."""
    event = _post(vocabulary) | {"actions": _actions(vocabulary.index), "dwell_time": _number(0, float("inf"))}
    return {
        "user_id": _rule(are_ids, ID_RULE),
        "history": _once(_posts(event, least=0)),
        "impression_ts": integer(0, MAX_TIME),
        "request_id": NAME,
    }


def _wishes(vocabulary: Vocabulary) -> dict[str, Rule]:
    """What a request for scores may say about its reply."""
    names = _names(vocabulary.index)
    return {
        "weights": _action_map(vocabulary.index, _number(-MAX_WEIGHT, MAX_WEIGHT)),
        "top_k": COUNT,
        "actions_wanted": _once(lambda value: names.problems(value) or _named_twice(value, vocabulary.index)),
    }


def _rule(fit: Callable[[Sequence[Any]], bool], sentence: str) -> Rule:
    problem = [("", sentence)]
    return Rule(fit, lambda value: () if fit([value]) else problem)


def fulfils(is_good: Callable[[Any], bool], sentence: str) -> Rule:
    """Of a value that is good in one way alone."""
    return _rule(lambda values: all(map(is_good, values)), sentence)


def _once(problems: Problems) -> Rule:
    """A rule for what a request holds once."""
    return Rule(lambda values: not any(map(problems, values)), problems)


NAME = fulfils(is_request_id, REQUEST_ID_RULE)


def integer_rule(low: int, high: int) -> str:
    """The sentence of an integer in these bounds."""
    return f"must be an integer between {low} and {high}"


def integer(low: int, high: int) -> Rule:
    """Of an integer in these bounds."""
    return _rule(_within({int}, low, high), integer_rule(low, high))


def number_rule(low: float, high: float) -> str:
    """The sentence of a number in these bounds."""
    return "must be a number " + (f"between {low:g} and {high:g}" if high < float("inf") else f"of at least {low:g}")


def _number(low: float, high: float) -> Rule:
    return _rule(_within({int, float}, low, high), number_rule(low, high))


def _within(kinds: set[type], low: float, high: float) -> Callable[[Sequence[Any]], bool]:
    return lambda values: (
        set(map(type, values)) <= kinds and (not values or (low <= min(values) and max(values) <= high))
    )


COUNT = integer(1, MAX_ID)


def object_of(rules: Rules) -> Rule:
    """Of an object whose fields have these rules; those in REQUIRED must be there."""

    def fit(values: Sequence[Any]) -> bool:
        if not set(map(type, values)) <= {dict} or not set().union(*values) <= rules.keys():
            return False
        for name, rule in rules.items():
            found = [value[name] for value in values if name in value]
            if (name in REQUIRED and len(found) < len(values)) or not rule.fit(found):
                return False
        return True

    def problems(value: Any) -> list[Problem]:
        if type(value) is not dict:
            return [("", "must be a JSON object")]
        unknown = islice((name for name in value if name not in rules), MAX_PROBLEMS)
        found = [("", _unknown_field(name, rules)) for name in unknown]
        for name, rule in rules.items():
            if name in value:
                if below := rule.problems(value[name]):
                    found += [(f".{name}{path}", sentence) for path, sentence in below]
            elif name in REQUIRED:
                found.append((f".{name}", "is required"))
        return found

    return Rule(fit, problems)


def _unknown_field(name: str, known: Collection[str]) -> str:
    """The unknown name may be anything, so only the nearest known one is shown."""
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_HINTED_NAME else []
    return "has an unknown field" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")


def array_of(rule: Rule, most: int | None = None) -> Rule:
    """Of an array all of whose entries have this rule, and that holds no more than `most`."""

    def fit(values: Sequence[Any]) -> bool:
        if not set(map(type, values)) <= {list} or (most is not None and any(len(value) > most for value in values)):
            return False
        return rule.fit(list(chain.from_iterable(values)))

    def problems(value: Any) -> list[Problem]:
        if type(value) is not list:
            return [("", "must be an array")]
        if most is not None and len(value) > most:
            return [("", f"must hold at most {most}")]
        found: list[Problem] = []
        for place in _wrong(rule, value):
            found += [(f"[{place}]{path}", sentence) for path, sentence in rule.problems(value[place])]
            if len(found) >= MAX_PROBLEMS:
                break
        return found

    return Rule(fit, problems)


def _wrong(rule: Rule, values: list[Any], start: int = 0, sizes: Sequence[int] = BLOCKS) -> Iterator[int]:
    """The places of values that are not right, counted from `start`."""
    size, *smaller = sizes
    for first in range(0, len(values), size):
        block = values[first : first + size]
        if rule.fit(block):
            continue
        if smaller:
            yield from _wrong(rule, block, start + first, smaller)
        else:
            yield start + first


def _posts(rules: Rules, least: int) -> Problems:
    objects, arrays = array_of(object_of(rules)), object_of({name: array_of(rule) for name, rule in rules.items()})

    def problems(value: Any) -> Sequence[Problem]:
        if type(value) is list:
            found, count = [*objects.problems(value)], len(value)
        elif type(value) is dict:
            found = [*arrays.problems(value)]
            lengths = {len(column) for column in value.values() if type(column) is list}
            if len(lengths) > 1:
                found.append(("", "must hold arrays of equal length"))
            count = max(lengths, default=0)
        else:
            return [("", "must be a list of objects or one object of equal-length arrays")]
        return found or ([("", "must not be empty")] if count < least else ())

    return problems


def _names(index: Mapping[str, int]) -> Rule:
    return array_of(_rule(lambda names: set(map(type, names)) <= {str} and set(names) <= index.keys(), ACTION_RULE))


def _named_twice(names: Collection[str], index: Mapping[str, int]) -> Sequence[Problem]:
    return [NAMED_TWICE] if len(set(map(index.__getitem__, names))) < len(names) else ()


def _action_map(index: Mapping[str, int], number: Rule) -> Rule:
    def fit(values: Sequence[Any]) -> bool:
        return (
            set(map(type, values)) <= {dict}
            and set().union(*values) <= index.keys()
            and not any(_named_twice(value, index) for value in values if len(value) > 1)
            and number.fit(list(chain.from_iterable(map(dict.values, values))))
        )

    def problems(value: Any) -> Sequence[Problem]:
        if type(value) is not dict:
            return [("", "must be a map of action to number")]
        if not value.keys() <= index.keys():
            return [("", f"every name {ACTION_RULE}")]
        return _named_twice(value, index) or [problem for entry in value.values() for problem in number.problems(entry)]

    return Rule(fit, problems)


def _actions(index: Mapping[str, int]) -> Rule:
    names, values = _names(index), _action_map(index, _number(0, MAX_ACTION_VALUE))
    neither = [("", "must be a list of names or a map of name to value")]

    def fit(found: Sequence[Any]) -> bool:
        lists = [actions for actions in found if type(actions) is list]
        return names.fit(lists) and values.fit([actions for actions in found if type(actions) is not list])

    return Rule(
        fit,
        lambda value: (
            names.problems(value) if type(value) is list else values.problems(value) if type(value) is dict else neither
        ),
    )
