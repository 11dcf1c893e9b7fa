"""Mutants of a module, and the tests that catch them, for whoever removes a test or makes it smaller.

    python tools/mutants.py flsv.vmap.coalition_rows tests/retraining/test_at_once.py --number 20

changes one thing at a time: a comparison, an operator, a ``not``, a number, or a call whose result nobody uses. Each
mutant is a fork of the process that has collected the tests, in which a function has other code. Its line ends with the
first test that fails, or with "-". Files stay as they are: code that reads its own source finds it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    path: Path
    function: str
    #: The place of a node in a walk through the file's tree.
    place: int

    def change(self) -> tuple[ast.Module, str]:
        """Return the changed tree of the file, and what has changed."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        node: Any = list(ast.walk(tree))[self.place]
        before = ast.unparse(node)
        change(node)
        change_in_words = (
            f"{self.path.name}:{node.lineno} {before[:50]} -> {ast.unparse(node)[:50]}"
        )
        return ast.fix_missing_locations(tree), change_in_words


def change(node: ast.AST) -> bool:
    """Change a node and return True, or False if nothing of it is changed."""
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in SWAPS:
            node.ops = [SWAPS[type(operator)](), *node.ops[1:]]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            node.op = SWAPS[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=int(value) | float(value)):
            node.value = not value if isinstance(value, bool) else value + 1
        case ast.Expr(value=ast.Call()):
            node.value = ast.Constant(None)
        case _:
            return False
    return True


def mutants_of(module: str, wanted: str | None) -> Iterator[Mutant]:
    """Yield the mutants of a module's functions, or of one, without decorators, defaults and errors' texts."""
    path = Path(str(importlib.import_module(module).__file__))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    places = {id(node): place for place, node in enumerate(ast.walk(tree))}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and wanted in (None, function.name):
            for node in nodes_of_body(function.body):
                if change(copy.copy(node)):
                    yield Mutant(path, function.name, places[id(node)])


def nodes_of_body(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.Raise, ast.JoinedStr)):
            yield node
            yield from nodes_of_body(ast.iter_child_nodes(node))


def replace_code(mutant: Mutant, tree: ast.Module) -> None:
    """Give the function that is changed its other code, wherever it is referred to."""
    compiled = compile(tree, str(mutant.path), "exec")
    other_codes = {(code.co_name, code.co_firstlineno): code for code in codes_in(compiled)}
    for function in gc.get_objects():
        if type(function) is types.FunctionType:
            code = function.__code__
            if code.co_filename == str(mutant.path) and code.co_name == mutant.function:
                function.__code__ = other_codes[code.co_name, code.co_firstlineno]


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


class MutantsInForks(list[Mutant]):
    """Plugin of pytest that runs the collected tests for each mutant, in place of once."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # so that functions are found
        for mutant in self:
            sys.stdout.flush()
            process = os.fork()
            if process == 0:
                tree, change_in_words = mutant.change()
                try:
                    replace_code(mutant, tree)
                    print(f"{change_in_words}: {first_failure(session.items)}", flush=True)
                except Exception as error:
                    print(f"{change_in_words}: {error!r}", flush=True)
                finally:
                    os._exit(0)
            os.waitpid(process, 0)
        return True


def first_failure(items: list[pytest.Item]) -> str:
    for item, next_item in zip(items, [*items[1:], None]):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=next_item)):
            return item.nodeid
    return "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+", help="files, folders, or tests by their ids")
    parser.add_argument("--number", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--function", help="of this function only")
    arguments = parser.parse_args()
    mutants = list(mutants_of(arguments.module, arguments.function))
    chosen = random.Random(arguments.seed).sample(mutants, min(arguments.number, len(mutants)))
    options = ["-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *arguments.tests]
    sys.exit(pytest.main(options, plugins=[MutantsInForks(chosen)]))
