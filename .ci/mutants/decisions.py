"""Finds the decisions and the wiring of the packages, Python and C++, and what each could be changed into. Knows nothing of tests."""

from __future__ import annotations

import ast
import bisect
import hashlib
import re
import subprocess
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "model", "weights")

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "and": "or", "or": "and", "&&": "||", "||": "&&", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*",
    "min": "max", "max": "min", "True": "False", "False": "True", "break": "continue", "continue": "break",
}  # fmt: skip
SYMBOLS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not",
    ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
CPP_WORDS = r"(?<= )(?:<=|>=|==|!=|&&|\|\||[<>+*/%-])(?= )|(?<=std::)(?:min|max)\b|\b(?:true|false|break|continue)\b|(?<![\w.])\d+(?![\w.])"
CPP_SKIPPED = re.compile(
    r'//.*|"(?:\\.|[^"\\])*"|^\s*#.*|^\s*(?:template|#|static_assert|constexpr Member|WHOLE|AT)\b.*', re.M
)


WORD, DROPS = "word", ("statement", "guard", "keyword", "with", "swap", "decorator", "finally")
SYMMETRIC = ("min", "max", "minimum", "maximum", "equal", "array_equal", "compare_digest", "fma", "transpose")
NEEDED = (
    "property",
    "setter",
    "staticmethod",
    "classmethod",
    "dataclass",
    "abstractmethod",
    "overload",
)  # or nothing runs
NOTHING = '__import__("contextlib").nullcontext()'
Change = tuple[int, str, str, str, int]  # as of `Mutant`: start, before, after, kind, reach


@dataclass(frozen=True)
class Mutant:
    """A change at a byte offset of a file. `line` is the text of its line, for people and for the list of equivalents.

    `kind`: a word that is swapped, or one of `DROPS`. `reach`: the line that a test has to run to notice, where it is not `number`.
    """

    file: str
    start: int
    before: str
    after: str
    number: int
    line: str
    kind: str = WORD
    reach: int = 0

    @property
    def change(self) -> str:
        return f"{self.before} → {self.after}" if self.kind == WORD else f"{self.kind}: {' '.join(self.before.split())}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.change

    @property
    def place(self) -> str:
        return f"{self.start} {self}"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.change}: {self.line}"


class Text:
    """A module's bytes, and where its nodes stand in them."""

    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.lines = [0, *(match.end() for match in re.finditer(rb"\n", self.raw))]

    def at(self, node: ast.expr | ast.stmt | ast.keyword, end: bool = False) -> int:
        """The byte offset of its beginning, or its end."""
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        return self.lines[line - 1] + column

    def of(self, first: ast.AST, last: ast.AST | None = None) -> str:
        """The text of a node, or from one to another."""
        return self.raw[self.at(first) : self.at(last or first, end=True)].decode()


def python_changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(byte offset, before, after) of every decision. Annotations, decorators, texts and the arguments of `Field` are none."""
    text = Text(source)
    raw, at = text.raw, text.at

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[tuple[int, str, str]]:
        word = SYMBOLS.get(type(operator))
        gap = raw[at(left, end=True) : at(right)].decode()
        if word and len(places := re.findall(rf"(?<![\w*/<>=!]){re.escape(word)}(?![\w*/<>=])", gap)) == 1:
            place = re.search(rf"(?<![\w*/<>=!]){re.escape(word)}(?![\w*/<>=])", gap)
            yield at(left, end=True) + len(gap[: place.start()].encode()), places[0], SWAPS[word]

    def walk(node: ast.AST) -> Iterator[tuple[int, str, str]]:
        match node:
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    yield from between(left, right, operator)
            case ast.BoolOp():
                yield from between(node.values[0], node.values[1], node.op)
            case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
                pass  # a path
            case ast.BinOp():
                yield from between(node.left, node.right, node.op)
            case ast.UnaryOp(op=ast.Not()):
                yield at(node), "not ", ""
            case ast.Name(id="min" | "max") | ast.Break() | ast.Continue():
                word = raw[at(node) : at(node, end=True)].decode()
                yield at(node), word, SWAPS[word]
            case ast.Constant(value=bool() | int() | float()):
                text = raw[at(node) : at(node, end=True)].decode()
                yield at(node), text, SWAPS.get(text) or f"({text} + 1)"
            case ast.Call(func=ast.Name(id="Field" | "TypeVar")) | ast.JoinedStr() | ast.keyword(arg="strict"):
                return
            case ast.FunctionDef(body=[*_, ast.Expr(value=ast.Constant(value=last))]) if last is ...:
                return  # of a protocol: what is called is another
        for name, inner in ast.iter_fields(node):
            if name not in ("annotation", "returns", "type_params", "decorator_list"):
                for child in inner if isinstance(inner, list) else [inner]:
                    if isinstance(child, ast.AST):
                        yield from walk(child)

    yield from walk(ast.parse(source))


def python_drops(source: str) -> Iterator[Change]:
    """Wiring that is dropped: statements with an effect, guards, keyword arguments, locks and other contexts, decorators, what
    `finally` does; and the first two arguments of a call, swapped. Expressions keep their effects.
    """
    text = Text(source)

    def call(node: ast.Call) -> Iterator[Change]:
        given = sorted([*node.args, *node.keywords], key=text.at)
        for one, after in zip(given, [*given[1:], None], strict=False):
            if isinstance(one, ast.keyword) and one.arg not in (None, "strict"):
                comma = re.compile(rb"\s*,?").match(text.raw, text.at(one, end=True))
                end = comma.end() if after is None else text.at(after)
                yield text.at(one), text.raw[text.at(one) : end].decode(), "", "keyword", one.lineno
        if len(node.args) > 1 and getattr(node.func, "id", getattr(node.func, "attr", "")) not in SYMMETRIC:
            first, second = node.args[:2]
            between = text.raw[text.at(first, end=True) : text.at(second)].decode()
            swapped = text.of(second) + between + text.of(first)
            if ast.dump(first) != ast.dump(second) and not any(
                isinstance(one, ast.Starred | ast.Yield) for one in (first, second)
            ):
                yield text.at(first), text.of(first, second), swapped, "swap", first.lineno

    def walk(node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.Call(func=ast.Name(id="Field")) | ast.JoinedStr():
                return
            case ast.Call():
                yield from call(node)
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
                yield text.at(node), text.of(node), "pass", "statement", node.lineno
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield text.at(node), text.of(node), "pass", "statement", node.lineno
            case ast.If(orelse=[], body=[first, *_]) if isinstance(
                node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break
            ):
                yield text.at(node.test), text.of(node.test), f"({text.of(node.test)}) and False", "guard", first.lineno
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars is None:
                        yield text.at(item.context_expr), text.of(item.context_expr), NOTHING, "with", node.lineno
            case ast.Try(finalbody=[first, *_]):
                yield text.at(first), text.of(first, node.finalbody[-1]), "pass", "finally", first.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for one in node.decorator_list:
                    if not any(name in text.of(one) for name in NEEDED):
                        yield text.at(one) - 1, f"@{text.of(one)}", "", "decorator", node.body[-1].lineno
        for name, inner in ast.iter_fields(node):
            if name not in ("annotation", "returns", "type_params", "decorator_list"):
                for child in inner if isinstance(inner, list) else [inner]:
                    if isinstance(child, ast.AST):
                        yield from walk(child)

    yield from walk(ast.parse(source))


def cpp_changes(source: str) -> Iterator[tuple[int, str, str]]:
    """The same by the words of a line: binary operators stand between spaces. Comments, macros and templates are left out."""
    blank = CPP_SKIPPED.sub(lambda match: " " * len(match[0]), source)
    for match in re.finditer(CPP_WORDS, blank):
        word = match[0]
        swap = {"true": "false", "false": "true"}.get(word) or SWAPS.get(word) or f"{int(word) + 1}"
        yield len(source[: match.start()].encode()), word, swap


CHANGES = {".py": python_changes, ".h": cpp_changes, ".cpp": cpp_changes}


def sources(root: Path) -> list[Path]:
    """The files of the packages."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*") if path.suffix in CHANGES)


def digest(path: Path) -> str:
    """Tells whether a file has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def decisions(root: Path, changed: Mapping[str, Container[int]] | None) -> list[Mutant]:
    """Every mutant of the packages; with `changed`, those on these lines."""
    found = []
    for path in sources(root):
        file = str(path.relative_to(root))
        if changed is not None and file not in changed:
            continue
        source = path.read_text()
        ends = [match.start() for match in re.finditer(rb"\n", source.encode())]
        texts = source.splitlines()
        words = {(*change, WORD, 0) for change in CHANGES[path.suffix](source)}
        drops = python_drops(source) if path.suffix == ".py" else ()
        for start, before, after, kind, reach in sorted({*words, *drops}):
            number = bisect.bisect_left(ends, start) + 1
            if changed is None or number in changed[file]:
                found.append(Mutant(file, start, before, after, number, texts[number - 1].strip(), kind, reach))
    return found


def changed_lines(since: str) -> dict[str, set[int]]:
    """Lines that are new since a commit, by file."""
    command = ["git", "diff", "-U0", since, "--", *PACKAGES]
    lines: dict[str, set[int]] = {}
    file = ""
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ b/"):
            file = line[6:]
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.setdefault(file, set()).update(range(first, first + count))
    return lines
