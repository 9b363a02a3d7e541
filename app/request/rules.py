"""Checks requests by their declaration: every value is judged here, and what is wrong is told as dotted paths and sentences.

A rule checks a whole column of values at once, so a long request costs little. A block that fails is split into smaller ones, down to
single values, and checking stops after ten problems. No sentence repeats anything that the caller sent.
"""

from __future__ import annotations

import difflib
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import contains, itemgetter
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, Struct, UnsetType
from msgspec.structs import fields

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.ids import MAX_ID
from app.request.vocabulary import Vocabulary

Values = Sequence[Any]
Fit = Callable[[Values], bool]
Problems = Iterable[tuple[int, str, str]]


class Rule(NamedTuple):
    """A check of values. `wrong` yields the problems of several values: place of the value, path below it, sentence.

    `bounds`: the least and the greatest number allowed."""

    wrong: Callable[[Values], Problems]
    bounds: tuple[float, float] | None = None


Rules = Mapping[str, Rule]

BLOCKS = (256, 16, 1)
MAX_HINTED_NAME = 32  # a longer unknown name is no typing error, and comparing it costs time
ACTION_RULE = "must name an action of this checkpoint, or be the decimal string of its index"
NO_MASK = "must have no bits beyond those of the {} actions"
NAMED_TWICE = "names an action twice, by name or by index"


def check(value: Any, rule: Rule) -> None:
    """Raise InvalidRequest with the first ten problems of a JSON value, if it has any."""
    if problems := [(path.removeprefix("."), text) for _, path, text in islice(rule.wrong([value]), MAX_PROBLEMS)]:
        raise InvalidRequest(problems)


def rule_of(hint: Any, vocabulary: Vocabulary | None = None) -> Rule:
    """The rule of a declared type: made by the `rule` in its metadata if there is one, else from its bounds."""
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
        return number(least["ge"], least.get("le", MAX_ID), whole=True)
    if kind is float:
        return number(least["ge"], least.get("le", float("inf")))
    if get_origin(kind) is list:
        return array_of(rule_of(get_args(kind)[0], vocabulary), least.get("max"), least.get("min", 0))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return fulfils(lambda value: value in choices, f"must be one of {', '.join(choices)}")
    return {bool: FLAG, str: TEXT, Any: ANYTHING}[kind]


def parts_of(hint: Any) -> tuple[Any, list[Meta]]:
    """A type without Annotated and UnsetType, and its metadata."""
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


def struct_rule(struct: type[Struct], vocabulary: Vocabulary | None = None, *without: str) -> Rule:
    """The rule of an object: its fields in order. With `without`, no field is required: another reader has checked those."""
    rules = {name: rule for name, rule in rules_of(struct, vocabulary).items() if name not in without}
    return object_of(rules, () if without else required_of(struct), None if without else getattr(struct, "whole", None))


def required_of(struct: type[Struct]) -> set[str]:
    """The names of the required fields."""
    return {field.name for field in fields(struct) if field.default is NODEFAULT}


def rules_of(struct: type[Struct], vocabulary: Vocabulary | None = None) -> dict[str, Rule]:
    """The rules of a struct's fields, by name."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: rule_of(hints[name], vocabulary) for name in struct.__struct_fields__}


def rule(*steps: tuple[Fit, str], path: str = "", bounds: tuple[float, float] | None = None) -> Rule:
    """A rule of steps: a `fit` says whether all values pass it. A value that fails gets the sentence of its first failed step."""

    def every(values: Values) -> bool:
        return all(fit(values) for fit, _ in steps)

    fits = steps[0][0] if len(steps) == 1 else every

    def wrong(values: Values) -> Problems:
        return () if not values or (len(values) <= BLOCKS[0] and fits(values)) else told(values)

    def told(values: Values) -> Problems:
        for place in _wrong(fits, values):
            yield place, path, next(text for fit, text in steps if not fit(values[place : place + 1]))

    return Rule(wrong, bounds)


def _wrong(fits: Fit, values: Values, start: int = 0, sizes: Sequence[int] = BLOCKS) -> Iterator[int]:
    """The places of the wrong values, counted from `start`."""
    size, *smaller = sizes
    for first in range(0, len(values), size):
        block = values[first : first + size]
        if fits(block):
            continue
        if smaller:
            yield from _wrong(fits, block, start + first, smaller)
        else:
            yield start + first


def fulfils(is_good: Callable[[Any], bool], sentence: str, path: str = "") -> Rule:
    """A rule that checks each value by itself."""
    return rule((lambda values: all(map(is_good, values)), sentence), path=path)


def _are(*kinds: type) -> Fit:
    known = {*kinds}
    return lambda values: set(map(type, values)) <= known


ANYTHING = rule()
TEXT = rule((_are(str), "must be a string"))
FLAG = rule((_are(bool), "must be true or false"))


def bounds_told(low: float, high: float, *, whole: bool) -> str:
    """The sentence that asks for a number in these bounds."""
    if whole:
        return f"must be an integer between {low} and {high}"
    return "must be a number " + (f"between {low:g} and {high:g}" if high < float("inf") else f"of at least {low:g}")


def number(low: float, high: float, *, whole: bool = False) -> Rule:
    """A rule for a number in these bounds; with `whole`, an integer."""
    return rule((_within(low, high, whole=whole), bounds_told(low, high, whole=whole)), bounds=(low, high))


def _within(low: float, high: float, *, whole: bool = False) -> Fit:
    kinds = {int} if whole else {int, float}
    return lambda values: (
        set(map(type, values)) <= kinds and (not values or (low <= min(values) and max(values) <= high))
    )


def then(*rules: Rule) -> Rule:
    """A rule that applies these rules in turn, and stops at the first with problems."""

    def wrong(values: Values) -> Problems:
        for rule in rules:
            problems = rule.wrong(values)
            if problems and (found := [*islice(problems, MAX_PROBLEMS)]):
                return found
        return ()

    return Rule(wrong)


def either(rules: Mapping[type, Rule], sentence: str) -> Rule:
    """A rule for values of several types, each type with its own rule."""
    others = rule((_are(*rules), sentence))

    def wrong(values: Values) -> Problems:
        kinds = set(map(type, values))
        return rules[kinds.pop()].wrong(values) if len(kinds) == 1 and kinds <= rules.keys() else mixed(values)

    def mixed(values: Values) -> Problems:
        for kind, rule in rules.items():
            places = [place for place, value in enumerate(values) if type(value) is kind]
            for place, path, text in rule.wrong([values[place] for place in places]):
                yield places[place], path, text
        yield from others.wrong(values)

    return Rule(wrong)


def field(name: str, rule: Rule) -> Rule:
    """A rule for objects: this field must pass the rule if it is present."""
    get = itemgetter(name)

    def wrong(values: Values) -> Problems:
        try:
            problems, places = rule.wrong([*map(get, values)]), range(len(values))
        except KeyError:
            some = [place for place, value in enumerate(values) if name in value]
            return told(rule.wrong([values[place][name] for place in some]), some)
        return told(problems, places) if problems else ()

    def told(problems: Problems, places: Sequence[int]) -> Problems:
        return ((places[place], f".{name}{path}", text) for place, path, text in problems)

    return Rule(wrong)


def object_of(rules: Rules, required: Collection[str], whole: Rule | None = None) -> Rule:
    """A rule for objects with these field rules; `whole` checks the object itself."""
    members = {name: field(name, rule).wrong for name, rule in rules.items()}

    def unknown(values: Values) -> Problems:
        found = ((place, name) for place, value in enumerate(values) for name in value if name not in rules)
        return ((place, "", _unknown_field(name, rules)) for place, name in found)

    def missing(values: Values, name: str) -> Problems:
        return ((place, f".{name}", "is required") for place, value in enumerate(values) if name not in value)

    def wrong(values: Values) -> Problems:
        names = set().union(*values)
        problems = [] if names <= members.keys() else [unknown(values)]
        if whole is not None and (found := whole.wrong(values)):
            problems.append(found)
        for name, member in members.items():
            if name in required and not all(map(contains, values, repeat(name))):
                problems.append(missing(values, name))
            if name in names and (found := member(values)):
                problems.append(found)
        return chain.from_iterable(problems) if problems else ()

    return either({dict: Rule(wrong)}, "must be a JSON object")


def _unknown_field(name: str, known: Collection[str]) -> str:
    """The sentence for an unknown field. It shows known names only: the unknown one may be anything."""
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_HINTED_NAME else []
    return "has an unknown field" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")


def array_of(entry: Rule, most: int | None = None, least: int = 0) -> Rule:
    """A rule for arrays of `least` … `most` entries that all pass `entry`."""

    def entries(values: Values) -> Problems:
        problems = entry.wrong(values[0] if len(values) == 1 else [*chain.from_iterable(values)])
        return told(values, problems) if problems else ()

    def told(values: Values, problems: Problems) -> Problems:
        ends = [*accumulate(map(len, values))]
        for place, path, text in problems:
            row = bisect(ends, place)
            yield row, f"[{place - ends[row] + len(values[row])}]{path}", text

    size = rule(
        (lambda values: most is None or max(map(len, values)) <= most, f"must hold at most {most}"),
        (lambda values: min(map(len, values)) >= least, "must not be empty"),
    )
    limited = then(size, Rule(entries)) if least or most is not None else Rule(entries)
    return either({list: limited}, "must be an array")


def posts(struct: type[Struct], least: int) -> Callable[[Vocabulary], Rule]:
    """Makes the rule for at least `least` posts, as objects or as columns."""

    def made(vocabulary: Vocabulary) -> Rule:
        rules, required = rules_of(struct, vocabulary), required_of(struct)
        arrays = object_of({name: array_of(rule) for name, rule in rules.items()}, required)
        equal = fulfils(lambda value: len(set(map(len, value.values()))) == 1, "must hold arrays of equal length")
        shapes: dict[type, Rule] = {list: array_of(object_of(rules, required)), dict: then(arrays, equal)}
        enough = fulfils(lambda value: count_of(value) >= least, "must not be empty")
        return then(either(shapes, "must be a list of objects or one object of equal-length arrays"), enough)

    return made


def count_of(items: Any) -> int:
    """The number of posts, as objects or as columns; 0 for any other value."""
    posts = items.get("post_id") if type(items) is dict else items
    return len(posts) if type(posts) is list else 0


def column_of(items: Any, name: str) -> list[Any]:
    """A field of valid posts, as objects or as columns: one entry per post, None where it was left out."""
    if type(items) is dict:
        return items[name] if name in items else [None] * count_of(items)
    try:
        return [*map(itemgetter(name), items)]
    except KeyError:
        return [item.get(name) for item in items]


def known_names(vocabulary: Vocabulary) -> Rule:
    """A rule for lists of known action names, each action at most once."""
    return then(_names(vocabulary.index), rule((_once(vocabulary.index), NAMED_TWICE)))


def weights_given(least: float, most: float, sets: Collection[str]) -> Callable[[Vocabulary], Rule]:
    """Makes the rule for a map from action to number, or for the name of one of `sets`."""
    named = {str: fulfils(lambda name: name in sets, f"as a name must be one of {', '.join(sets)}")}
    return lambda vocabulary: _by_action(vocabulary, least, most, named, "must be a map of action to number or a name")


def _names(index: Mapping[str, int]) -> Rule:
    return array_of(rule((lambda names: _are(str)(names) and set(names) <= index.keys(), ACTION_RULE)))


def _once(index: Mapping[str, int]) -> Fit:
    """Whether the names in each value, all known, stand for different actions."""
    return lambda values: all(
        len(names) < 2 or len(set(map(index.__getitem__, names))) == len(names) for names in values
    )


def _action_map(index: Mapping[str, int], least: float, most: float) -> Rule:
    fits = _within(least, most)
    return rule(
        (lambda values: set().union(*values) <= index.keys(), f"every name {ACTION_RULE}"),
        (_once(index), NAMED_TWICE),
        (lambda values: fits([*chain.from_iterable(map(dict.values, values))]), bounds_told(least, most, whole=False)),
    )


def actions_taken(most: float) -> Callable[[Vocabulary], Rule]:
    """Makes the rule for a list of names, a map of name to value, or an integer whose bits are actions."""

    def made(vocabulary: Vocabulary) -> Rule:
        width = len(vocabulary.action_names)
        mask = rule((_within(0, min(2**width - 1, MAX_ID), whole=True), NO_MASK.format(width)))
        others = {list: _names(vocabulary.index), int: mask}
        return _by_action(vocabulary, 0, most, others, "must be a list of names, a map of name to value or a mask")

    return made


def _by_action(vocabulary: Vocabulary, least: float, most: float, others: Mapping[Any, Rule], sentence: str) -> Rule:
    return either({dict: _action_map(vocabulary.index, least, most), **others}, sentence)._replace(bounds=(least, most))
