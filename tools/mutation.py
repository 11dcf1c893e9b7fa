"""Mutants of a module: its syntax tree with one thing changed.

Operators, comparisons, boolean operators, numbers, conditions and what is returned, within functions. What is left out
changes no behaviour that a test should pin: messages (what is raised or warned, f-strings), annotations, decorators.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.MatMult: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_WARNS = ("warn", "rank_zero_warn", "rank_zero_info", "note")
_KEYWORDS = ("stacklevel", "figsize", "fontsize", "linewidth", "dpi")  # how it looks


@dataclass(frozen=True)
class Mutant:
    """One change: ``number`` is its place in :func:`mutants` of its file, from which :func:`mutated` makes it again."""

    file: str
    number: int
    line: int
    #: Of the statement around it, or of the function's first one around a default: where coverage counts it.
    reach: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"


def mutants(file: str, source: str) -> list[Mutant]:
    """All of a file's.

    Example:
        >>> for each in mutants("a.py", "def f(x):\\n    return x + 1 if x < 0 else -x")[:3]:
        ...     print(each)
        a.py:2 return: x + 1 if x < 0 else -x -> None
        a.py:2 condition: x < 0 -> not x < 0
        a.py:2 comparison: x < 0 -> x <= 0
    """
    tree = ast.parse(source)
    found = []
    for number, (node, kind, change, reach) in enumerate(_places(tree)):
        before = _text(node)
        changed = copy.deepcopy(node)
        change(changed)
        found.append(Mutant(file, number, node.lineno, reach, kind, before, _text(changed)))
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The tree of the mutant of this number."""
    tree = ast.parse(source)
    node, _, change, _ = next(place for i, place in enumerate(_places(tree)) if i == number)
    change(node)
    return ast.fix_missing_locations(tree)


Place = tuple["ast.stmt | ast.expr", str, Callable[[ast.AST], None], int]


def _places(tree: ast.Module) -> Iterator[Place]:
    for node in tree.body:
        yield from _below(node, 0)


def _below(node: ast.AST, reach: int) -> Iterator[Place]:
    """``reach`` is 0 outside of functions."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and _name(node.func) in _WARNS:
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.body, *node.args.defaults, *(x for x in node.args.kw_defaults if x)]
        text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        reach = node.body[1 if text and len(node.body) > 1 else 0].lineno
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    elif isinstance(node, ast.ClassDef):
        children = list(node.body)
    elif isinstance(node, ast.Call):
        children = [node.func, *node.args, *(x.value for x in node.keywords if x.arg not in _KEYWORDS)]
    else:
        children = list(ast.iter_child_nodes(node))
    if reach:
        reach = node.lineno if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef) else reach
        yield from ((*place, reach) for place in _of(node))
    for child in children:
        yield from _below(child, reach)


def _of(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str, Callable[[ast.AST], None]]]:
    """What can be changed of one node."""
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "return", _returns_none
    if isinstance(node, ast.If | ast.IfExp | ast.While) and _name(node.test) != "TYPE_CHECKING":
        yield node.test, "condition", _negated
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS and not _of_text(node):
        yield node, "operator", _swapped
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield node, "comparison", _compares_otherwise
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node, "sign", _without_sign
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield node, "constant", _next_number


def _returns_none(node: ast.AST) -> None:
    node.value = ast.Constant(None)  # type: ignore[attr-defined]


def _negated(node: ast.AST) -> None:
    """In place, whatever the node was."""
    inner = copy.copy(node)
    _becomes(node, ast.UnaryOp(ast.Not(), inner))  # type: ignore[arg-type]


def _without_sign(node: ast.AST) -> None:
    _becomes(node, node.operand)  # type: ignore[attr-defined]


def _becomes(node: ast.AST, other: ast.AST) -> None:
    place = {name: getattr(node, name) for name in node._attributes}
    node.__class__ = type(other)
    node.__dict__.clear()
    node.__dict__.update({**place, **{name: value for name, value in vars(other).items() if name not in place}})


def _swapped(node: ast.AST) -> None:
    node.op = _SWAPS[type(node.op)]()  # type: ignore[attr-defined]


def _compares_otherwise(node: ast.AST) -> None:
    node.ops = [_SWAPS[type(node.ops[0])](), *node.ops[1:]]  # type: ignore[attr-defined]


def _next_number(node: ast.AST) -> None:
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[attr-defined]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _of_text(node: ast.AST) -> bool:
    """Whether strings are joined or formatted, or types: ``str | None``."""
    sides = (getattr(node, "left", None), getattr(node, "right", None))
    texts = (ast.JoinedStr, ast.Constant)
    return any(isinstance(x, texts) and not isinstance(getattr(x, "value", ""), int | float | complex) for x in sides)


def _text(node: ast.AST) -> str:
    text = ast.unparse(node) if not isinstance(node, ast.Return) else ast.unparse(node.value) if node.value else "None"
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"


def of_package(root: Path) -> list[Mutant]:
    """All of ``flsv/``, file by file in the order of their names; of the pages of templates none."""
    files = sorted(path for path in (root / "flsv").rglob("*.py") if "template" not in str(path.relative_to(root)))
    return [each for path in files for each in mutants(path.relative_to(root).as_posix(), path.read_text())]
