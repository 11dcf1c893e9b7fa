"""How much code there is: lines with a token that is no comment and no docstring, and what is over a limit.

    python tools/count_code.py [FOLDER] [--check]
    python tools/count_code.py [FOLDER] --docstrings SEED

Prints lines and files of ``flsv`` (or FOLDER) and of each folder in it, and files, arguments, words and lines
that are over a limit. With ``--check`` it fails for one that is. Who takes something away lowers the limit.
``--docstrings`` prints 60 docstrings, drawn by this seed, for somebody to read who has not written them.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

#: Lines of a file, arguments of the loop and of the data module.
LONGEST, ARGUMENTS = 450, 14
#: Of what surrounds the package: the limit, and the aim of 1.0.
BUDGETS = {
    "words of all pages": (29_990, 30_000),
    "of these of guides": (11_170, 12_000),
    "lines of tests": (34_330, 31_000),
    "lines of tools": (4_700, 4_500),
    "scripts in tools": (23, 25),
    "lines of flsv": (29_230, 28_000),
    "words of docstrings": (87_700, 90_000),
}
#: Lines of code in the rooms of flsv: the limit, and the aim where the design has one.
ROOMS: dict[str, tuple[int, int | None]] = {
    "_lightning": (770, None), "benchmark": (810, 1_000), "cli": (1_710, 1_500), "core": (1_140, None),
    "data": (3_070, 2_600), "engines": (2_460, 2_100), "federation": (1_040, None), "functional": (2_140, 2_800),
    "games": (1_540, 1_500), "metrics": (1_920, 1_900), "models": (640, None), "outside": (490, None),
    "personalization": (680, None), "report": (770, None), "results": (1_010, None), "retraining": (1_950, None),
    "sampling": (350, None), "server": (620, None), "testing": (570, 700), "training": (1_920, None),
    "utilities": (1_240, None), "valuation": (520, None),
}  # fmt: skip
#: Rooms of docs/ that are no guides: results, and what is looked up.
NO_GUIDES = ("results", "reference")
NOTHING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each; a string below an attribute is one, too."""
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.end_lineno or child.lineno


def code_lines(source: str) -> int:
    """Lines that hold code."""
    words = {line for first, last in docstrings(ast.parse(source)) for line in range(first, last + 1)}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOTHING:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - words)


def surroundings(root: Path) -> dict[str, int]:
    """What :data:`BUDGETS` limits, counted in a checkout."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in pages}
    guides = [path for path in words if "docs" in path.relative_to(root).parts and path.parent.name not in NO_GUIDES]
    guides = [path for path in guides if not path.name.startswith("benchmark")]
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in root.glob("t*s/**/*.py")}
    tools = [path for path in lines if path.relative_to(root).parts[0] == "tools"]
    return {
        "words of all pages": sum(words.values()),
        "of these of guides": sum(words[path] for path in guides) + words[root / "README.md"],
        "lines of tests": sum(lines.values()) - sum(lines[path] for path in tools),
        "lines of tools": sum(lines[path] for path in tools),
        "scripts in tools": len(tools),
    }


def main() -> int:
    """The command line; with ``--check`` 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "flsv")
    parser.add_argument("--check", action="store_true", help="exit with 1 where something is over a limit")
    parser.add_argument("--docstrings", type=int, metavar="SEED", help="print 60 docstrings instead")
    options = parser.parse_args()
    sources = {path: path.read_text() for path in sorted(options.folder.rglob("*.py"))}
    if options.docstrings is not None:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        every = [
            f"{path.relative_to(options.folder)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}\n\n{text}"
            for path, source in sources.items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, documented) and (text := ast.get_docstring(node))
        ]
        print("\n\n".join(random.Random(options.docstrings).sample(every, 60)))
        return 0
    rooms, files = Counter[str](), Counter[str]()
    for path, source in sources.items():
        room = path.relative_to(options.folder).parts[0] if path.parent != options.folder else "."
        rooms[room] += code_lines(source)
        files[room] += 1
    print(f"{options.folder.name}: {rooms.total():,} lines of code in {len(sources)} files")
    for room, total in rooms.most_common():
        limit, aim = ROOMS.get(room, (None, None))
        limits = f"limit {limit:,}" + (f", aim {aim:,}" if aim else "") if limit else ""
        print(f"  {room:20} {total:6,} lines {files[room]:4} files  {limits}")
    lengths = {path.relative_to(options.folder): source.count("\n") for path, source in sources.items()}
    over = [f"more than {LONGEST} lines: {path} ({length})" for path, length in lengths.items() if length > LONGEST]
    if options.folder.name == "flsv":
        from flsv import FederatedDataModule, FederatedLoop

        for found in (FederatedLoop, FederatedDataModule):
            arguments = len(inspect.signature(found).parameters)
            over += [f"more than {ARGUMENTS} arguments: {found.__name__}"] if arguments > ARGUMENTS else []
        print(f"{'':20} {'now':>8} {'limit':>8} {'aim':>8}")
        words = sum(
            len((ast.get_docstring(node) or "").split())
            for source in sources.values()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        )
        whole = {"lines of flsv": rooms.total(), "words of docstrings": words}
        for what, count in (surroundings(options.folder.resolve().parent) | whole).items():
            limit, aim = BUDGETS[what]
            print(f"{what:20} {count:8,} {limit:8,} {aim:8,}")
            over += [f"more than {limit:,} {what}: {count:,}"] if count > limit else []
        over += [f"{room}: {rooms[room]:,} lines" for room, (limit, _) in ROOMS.items() if rooms[room] > limit]
    print("\n".join(over), end="\n" if over else "")
    return int(options.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
