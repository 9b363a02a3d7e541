"""Finds the decisions of the packages, Python and C++, and what each could be changed into. Knows nothing of tests."""

from __future__ import annotations

import ast
import bisect
import hashlib
import re
import subprocess
from collections.abc import Iterator
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


@dataclass(frozen=True)
class Mutant:
    """A change at a byte offset of a file. `line` is the text of its line, for people and for the list of equivalents."""

    file: str
    start: int
    before: str
    after: str
    number: int
    line: str

    @property
    def change(self) -> str:
        return f"{self.before} → {self.after}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.change

    @property
    def place(self) -> str:
        return f"{self.start} {self}"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.change}: {self.line}"


def python_changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(byte offset, before, after) of every decision. Annotations, decorators, texts and the arguments of `Field` are none."""
    raw = source.encode()
    lines = [0, *(match.end() for match in re.finditer(rb"\n", raw))]

    def at(node: ast.expr | ast.stmt, end: bool = False) -> int:
        return lines[(node.end_lineno if end else node.lineno) - 1] + (node.end_col_offset if end else node.col_offset)

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
            case ast.Call(func=ast.Name(id="Field")) | ast.JoinedStr():
                return
            case ast.FunctionDef(body=[*_, ast.Expr(value=ast.Constant(value=last))]) if last is ...:
                return  # of a protocol: what is called is another
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


def decisions(root: Path, changed: dict[str, set[int]] | None) -> list[Mutant]:
    """Every mutant of the packages; with `changed`, those on these lines."""
    found = []
    for path in sources(root):
        file, source = str(path.relative_to(root)), path.read_text()
        ends = [match.start() for match in re.finditer(rb"\n", source.encode())]
        texts = source.splitlines()
        for start, before, after in sorted(set(CHANGES[path.suffix](source))):
            number = bisect.bisect_left(ends, start) + 1
            if changed is None or number in changed.get(file, ()):
                found.append(Mutant(file, start, before, after, number, texts[number - 1].strip()))
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
