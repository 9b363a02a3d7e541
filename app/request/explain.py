"""What is wrong with a refused request, as dotted paths and sentences that hold nothing the caller sent.

Values are checked in blocks, all of a block at once; a block that is not right is cut into smaller ones, down to single values.
So a long request with a few faults costs little more than one without. Looking stops after about ten problems.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, Raw, Struct, UnsetType
from msgspec.structs import fields

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.ids import MAX_ID
from app.request.vocabulary import Vocabulary

Problem = tuple[str, str]
Problems = Callable[[Any], Sequence[Problem]]  # (path below the value, sentence)


class Rule(NamedTuple):
    """What a value must be, said twice: whether all of several values are right, fast, and what is wrong with one.

    `bounds`: the least and the most that the numbers in it may be."""

    fit: Callable[[Sequence[Any]], bool]
    problems: Problems
    bounds: tuple[float, float] | None = None


Rules = Mapping[str, Rule]

BLOCKS = (256, 16, 1)
MAX_HINTED_NAME = 32  # a longer unknown name is no typing error, and comparing it costs time
ACTION_RULE = "must name an action of this checkpoint, or be the decimal string of its index"
NAMED_TWICE = ("", "names one action twice, by name and by index")


def explain(body: Any, rule: Rule) -> InvalidRequest:
    """The error for a JSON value that breaks the rule of a request."""
    problems = rule.problems(body)
    assert problems, "a request was refused that has nothing wrong with it"
    return InvalidRequest([(path.removeprefix("."), sentence) for path, sentence in problems])


def rule_of(hint: Any, vocabulary: Vocabulary | None = None) -> Rule:
    """The rule of a declared type, from its bounds, or made by the `rule` that its metadata names."""
    kind, metas = parts_of(hint)
    least: dict[str, Any] = {}
    for meta in metas:
        if meta.extra and "rule" in meta.extra:
            made: Rule = meta.extra["rule"](vocabulary)
            return made
        known = {"ge": meta.ge, "le": meta.le, "min": meta.min_length, "max": meta.max_length}
        known |= {"le": (meta.extra_json_schema or {}).get("maximum", meta.le)}
        least |= {name: bound for name, bound in known.items() if bound is not None}
    if isinstance(kind, type) and issubclass(kind, Struct):
        return struct_rule(kind, vocabulary)
    if kind is int:
        return integer(least["ge"], least.get("le", MAX_ID))
    if kind is float:
        return number(least["ge"], least.get("le", float("inf")))
    if get_origin(kind) is list:
        return array_of(rule_of(get_args(kind)[0], vocabulary), least.get("max"), least.get("min", 0))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return fulfils(lambda value: value in choices, f"must be one of {', '.join(choices)}")
    return {bool: FLAG, str: TEXT, Raw: ANYTHING}[kind]


def parts_of(hint: Any) -> tuple[Any, list[Meta]]:
    """A type without what says that it may be left out, and its metadata."""
    metas: list[Meta] = []
    while True:
        if get_origin(hint) is Annotated:
            metas += hint.__metadata__
            hint = hint.__origin__
            continue
        rest = [kind for kind in get_args(hint) if kind is not UnsetType]
        if get_origin(hint) not in (Union, UnionType) or len(rest) != 1:
            return hint, metas
        hint = rest[0]


def struct_rule(struct: type[Struct], vocabulary: Vocabulary | None = None) -> Rule:
    """The rule of an object: of each field, in their order."""
    return object_of(rules_of(struct, vocabulary), required_of(struct))


def required_of(struct: type[Struct]) -> set[str]:
    """The fields that must be there."""
    return {field.name for field in fields(struct) if field.default is NODEFAULT}


def rules_of(struct: type[Struct], vocabulary: Vocabulary | None = None) -> dict[str, Rule]:
    """The rules of its fields by name."""
    hints = get_type_hints(struct, include_extras=True)
    return {field.name: rule_of(hints[field.name], vocabulary) for field in fields(struct)}


def rule(fit: Callable[[Sequence[Any]], bool], sentence: str) -> Rule:
    problem = [("", sentence)]
    return Rule(fit, lambda value: () if fit([value]) else problem)


def fulfils(is_good: Callable[[Any], bool], sentence: str) -> Rule:
    """Of a value that is good in one way alone."""
    return rule(lambda values: all(map(is_good, values)), sentence)


def once(problems: Problems) -> Rule:
    """A rule for what a request holds once."""
    return Rule(lambda values: not any(map(problems, values)), problems)


ANYTHING = fulfils(lambda value: True, "")
TEXT = fulfils(lambda value: type(value) is str, "must be a string")
FLAG = fulfils(lambda value: type(value) is bool, "must be true or false")


def integer_rule(low: int, high: int) -> str:
    """The sentence of an integer in these bounds."""
    return f"must be an integer between {low} and {high}"


def integer(low: int, high: int) -> Rule:
    """Of an integer in these bounds."""
    return rule(_within({int}, low, high), integer_rule(low, high))._replace(bounds=(low, high))


def number_rule(low: float, high: float) -> str:
    """The sentence of a number in these bounds."""
    return "must be a number " + (f"between {low:g} and {high:g}" if high < float("inf") else f"of at least {low:g}")


def number(low: float, high: float) -> Rule:
    """Of a number in these bounds."""
    return rule(_within({int, float}, low, high), number_rule(low, high))._replace(bounds=(low, high))


def _within(kinds: set[type], low: float, high: float) -> Callable[[Sequence[Any]], bool]:
    return lambda values: (
        set(map(type, values)) <= kinds and (not values or (low <= min(values) and max(values) <= high))
    )


def object_of(rules: Rules, required: Collection[str]) -> Rule:
    """Of an object whose fields have these rules."""

    def fit(values: Sequence[Any]) -> bool:
        if not set(map(type, values)) <= {dict} or not set().union(*values) <= rules.keys():
            return False
        for name, rule in rules.items():
            found = [value[name] for value in values if name in value]
            if (name in required and len(found) < len(values)) or not rule.fit(found):
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
            elif name in required:
                found.append((f".{name}", "is required"))
        return found

    return Rule(fit, problems)


def _unknown_field(name: str, known: Collection[str]) -> str:
    """The unknown name may be anything, so only the nearest known one is shown."""
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_HINTED_NAME else []
    return "has an unknown field" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")


def array_of(rule: Rule, most: int | None = None, least: int = 0) -> Rule:
    """Of an array all of whose entries have this rule, and that holds `least` … `most` of them."""

    def fit(values: Sequence[Any]) -> bool:
        if not set(map(type, values)) <= {list}:
            return False
        if any(len(value) < least or (most is not None and len(value) > most) for value in values):
            return False
        return rule.fit(list(chain.from_iterable(values)))

    def problems(value: Any) -> list[Problem]:
        if type(value) is not list:
            return [("", "must be an array")]
        if most is not None and len(value) > most:
            return [("", f"must hold at most {most}")]
        if len(value) < least:
            return [("", "must not be empty")]
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


def posts(struct: type[Struct], least: int) -> Callable[[Vocabulary], Rule]:
    """Makes the rule of posts in either shape, `least` at least."""
    return lambda vocabulary: once(_posts(rules_of(struct, vocabulary), required_of(struct), least))


def _posts(rules: Rules, required: Collection[str], least: int) -> Problems:
    objects = array_of(object_of(rules, required))
    arrays = object_of({name: array_of(rule) for name, rule in rules.items()}, required)

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


def known_names(vocabulary: Vocabulary) -> Rule:
    """Of names of different actions."""
    names, index = _names(vocabulary.index), vocabulary.index
    return once(lambda value: names.problems(value) or _named_twice(value, index))


def by_action(least: float, most: float) -> Callable[[Vocabulary], Rule]:
    """Makes the rule of a map from action to number."""
    return lambda vocabulary: _action_map(vocabulary.index, number(least, most))


def _names(index: Mapping[str, int]) -> Rule:
    return array_of(rule(lambda names: set(map(type, names)) <= {str} and set(names) <= index.keys(), ACTION_RULE))


def _named_twice(names: Collection[str], index: Mapping[str, int]) -> Sequence[Problem]:
    return [NAMED_TWICE] if len(set(map(index.__getitem__, names))) < len(names) else ()


def _action_map(index: Mapping[str, int], value_rule: Rule) -> Rule:
    def fit(values: Sequence[Any]) -> bool:
        return (
            set(map(type, values)) <= {dict}
            and set().union(*values) <= index.keys()
            and not any(_named_twice(value, index) for value in values if len(value) > 1)
            and value_rule.fit(list(chain.from_iterable(map(dict.values, values))))
        )

    def problems(value: Any) -> Sequence[Problem]:
        if type(value) is not dict:
            return [("", "must be a map of action to number")]
        if not value.keys() <= index.keys():
            return [("", f"every name {ACTION_RULE}")]
        return _named_twice(value, index) or [
            problem for entry in value.values() for problem in value_rule.problems(entry)
        ]

    return Rule(fit, problems, value_rule.bounds)


def actions_taken(most: float) -> Callable[[Vocabulary], Rule]:
    """Makes the rule of a list of names or a map of name to value."""
    return lambda vocabulary: _actions(vocabulary.index, most)


def _actions(index: Mapping[str, int], most: float) -> Rule:
    names, values = _names(index), _action_map(index, number(0, most))
    neither = [("", "must be a list of names or a map of name to value")]

    def fit(found: Sequence[Any]) -> bool:
        lists = [actions for actions in found if type(actions) is list]
        return names.fit(lists) and values.fit([actions for actions in found if type(actions) is not list])

    return Rule(
        fit,
        lambda value: (
            names.problems(value) if type(value) is list else values.problems(value) if type(value) is dict else neither
        ),
        (0, most),
    )
