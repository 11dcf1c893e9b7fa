"""How much code there is and how densely it is written, beside the limits.

    python tools/count_code.py [FOLDER] [--check]
    python tools/count_code.py --record

Code is counted in tokens, without comments and docstrings. The expressions inside of an f-string count, and its text is
one token, on each version of Python. What a file has is counted again only when it has changed.

``house.yaml`` has what stands of each room of the core and of each wing. ``--check`` fails where that or a budget is
exceeded by more than its margin, and for a file whose code is too dense, has a vague name, or a name that the glossary
refuses. Code that was written before the first two limits is exempt until somebody changes it: ``packed_code.txt`` has
a digest of each such function and statement. ``--record`` drops the digests of what is gone. Leaves of
``flsv/contrib`` count for no budget, and their writing is their owners'.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import pickle
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from house import house, place_of

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("packed_code.txt")

#: What stands, and the aim. A commit that raises a number by more than the margin of ``house.yaml`` says why.
BUDGETS = {
    "tokens of flsv": (386_586, 290_000),
    "tokens of the core": (260_196, 235_000),
    "words of all pages": (31_121, 30_000),
    "words of guides": (13_492, 12_000),
    "words of docstrings": (101_326, 90_000),
}
LINES_OF_A_FILE = 600
#: The folder of the package and of the tests whose files are other people's.
CONTRIB = "contrib"
ARGUMENTS = 15

#: A line of many tokens is a line to read twice.
MANY_TOKENS = 20


@dataclass(frozen=True)
class Density:
    """Limits on how much stands on a line."""

    tokens_per_line: float
    percent_of_long_lines: float


DENSITY_OF_CODE = Density(tokens_per_line=9.0, percent_of_long_lines=6.0)
# Readers are stopped by a short call that stands one argument a line, which a lower limit asks for.
DENSITY_OF_TESTS = Density(tokens_per_line=11.5, percent_of_long_lines=20.0)

#: Names that say how their author came to a value, and not what the value is.
VAGUE_WORDS = """
each given found kept made held known own place of by here other others which some more taken
asked said told way about first last start ends live usual drawn left mine theirs seen named
concerned before after both one two rest most least far near once again what who whose back
"""
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())
#: Names that users write, or that stand in their files, by the file that binds them.
PUBLIC_NAMES = {
    "flsv/data/skew.py": {"of"},
    "flsv/filters/copies.py": {"_start"},
    "flsv/functional/fedce.py": {"own"},
    "flsv/functional/pfedsv.py": {"own"},
    "flsv/functional/shapley/few_coalitions.py": {"which"},
    "flsv/metrics/contribution_estimation.py": {"seen"},
    "flsv/metrics/gradient_agreement.py": {"gain", "seen"},
    "flsv/metrics/gradient_shapley.py": {"seen"},
    "flsv/outside/value_round.py": {"start"},
    "flsv/personalization/pfedsv.py": {"start"},
    "flsv/testing/metric.py": {"given"},
    "flsv/training/algorithms/base.py": {"start"},
    "flsv/training/algorithms/fedprox.py": {"start"},
    "flsv/valuation/fedbary.py": {"others"},
}

#: The page with the names that the package does not use.
GLOSSARY = "docs/reference/glossary.md"

#: Folders of docs/ that are no guides: results, and what is looked up.
NO_GUIDES = ("results", "reference")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Lines = set[int]


@dataclass(frozen=True)
class Unit:
    """A function, or a statement that stands in no function."""

    lines: Lines
    digest: str
    names: tuple[tuple[str, int], ...]


def is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a text; one below an attribute is a docstring, too."""
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: ast.AST) -> Lines:
    """Return the numbers of the lines that a statement stands on, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return set(range(first_line, node.end_lineno + 1))


def tokens_by_line(source: str) -> Counter[int]:
    """Count the tokens of code that begin on each line."""
    tree = ast.parse(source)
    docstring_lines: Lines = set()
    for node in ast.walk(tree):
        if is_docstring(node):
            docstring_lines |= lines_of(node)

    counts = Counter[int]()
    for token in tokens_of(source):
        if token.start[0] not in docstring_lines:
            counts[token.start[0]] += 1
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):
            tokens = tokens_of(ast.unparse(node.value))
            counts[node.value.lineno] += sum(1 for _ in tokens)
    return counts


#: Python 3.12 and later read an f-string as tokens of its own. Other strings have no begin and end.
_BEGIN_OF_TEXT = {
    getattr(tokenize, "FSTRING_START", None),
    getattr(tokenize, "TSTRING_START", None),
}
_END_OF_TEXT = {
    getattr(tokenize, "FSTRING_END", None),
    getattr(tokenize, "TSTRING_END", None),
}


def tokens_of(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of code, an f-string with all that is in it as one."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _END_OF_TEXT:
            depth -= 1
            continue
        if depth == 0 and token.type not in NO_CODE:
            yield token
        if token.type in _BEGIN_OF_TEXT:
            depth += 1


def units_of(source: str) -> Iterator[Unit]:
    """Yield the functions of a file, and its statements that stand in no function."""
    pending: list[ast.AST] = [*ast.parse(source).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            pending += node.body
            continue
        if is_docstring(node) or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        yield Unit(lines=lines_of(node), digest=digest_of(node), names=tuple(vague_names(node)))


def digest_of(node: ast.AST) -> str:
    """Return a digest of a statement that neither layout, docstrings nor the version of Python change.

    A test's digest does not depend on the rows of its table, so that a new row is no new code.
    """
    facts = []
    for child in ast.walk(without_rows(without_docstring(node))):
        values = [
            value for _, value in ast.iter_fields(child) if not isinstance(value, ast.AST | list)
        ]
        facts.append((type(child).__name__, *map(repr, values)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def without_docstring(node: ast.AST) -> ast.AST:
    """Return a function without its docstring, and any other statement as it is."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and is_docstring(body[0]):
        node.body = body[1:]
    return node


#: Literals that hold rows.
_TABLES = (ast.Dict, ast.List, ast.Set, ast.Tuple)


def without_rows(node: ast.AST) -> ast.AST:
    """Return a test without the rows that its decorators hold, and any other statement as it is."""
    is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    for decorator in node.decorator_list if is_test else ():
        for argument in getattr(decorator, "args", ()):
            if isinstance(argument, _TABLES):
                vars(argument).update({name: [] for name in ("elts", "keys", "values")})
    return node


def bound_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of variables, attributes and arguments that a statement binds, each with its line."""
    for child in ast.walk(node):
        is_bound = isinstance(getattr(child, "ctx", None), ast.Store)
        if isinstance(child, ast.Name) and is_bound:
            yield child.id, child.lineno
        elif isinstance(child, ast.Attribute) and is_bound:
            yield child.attr, child.lineno
        elif isinstance(child, ast.arg):
            yield child.arg, child.lineno


def vague_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the vague names that a statement binds, each with its line."""
    for name, line in bound_names(node):
        if name.strip("_") in VAGUE_NAMES:
            yield name, line


def words_of_glossary() -> dict[str, str]:
    """Return the names that the glossary gives another word for, as in "`told` (reported)"."""
    page = (ROOT / GLOSSARY).read_text(encoding="utf-8")
    return dict(re.findall(r"`(\w+)`\s\(([^`)]+)\)", page))


def other_words(
    path: Path,
    words: Mapping[str, str],
) -> list[str]:
    """Return which names that a file binds, also those of its functions and classes, have another word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = list(bound_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append((node.name, node.lineno))

    file = path.relative_to(ROOT).as_posix()
    public_names = PUBLIC_NAMES.get(file, set())
    problems = []
    for name, line in names:
        word = words.get(name.strip("_"))
        if word is not None and name not in public_names:
            problems.append(f"another word: {file}:{line} {name}; {GLOSSARY} says {word}")
    return problems


def is_dense(
    counts: Iterable[int],
    limits: Density,
) -> bool:
    """Return whether lines of so many tokens are over the limits, apart from one long line."""
    counts = list(counts)
    long_lines = sum(count >= MANY_TOKENS for count in counts)
    permitted_tokens = limits.tokens_per_line * len(counts) + MANY_TOKENS
    permitted_long_lines = max(1.0, limits.percent_of_long_lines / 100 * len(counts))
    return sum(counts) > permitted_tokens or long_lines > permitted_long_lines


def limits_of(path: Path) -> Density:
    """Return the limits for a file: tests are tables, and may be a little denser."""
    if path.relative_to(ROOT).parts[0] == "tests":
        return DENSITY_OF_TESTS
    return DENSITY_OF_CODE


def hard_to_read(path: Path, exempt: set[str]) -> list[str]:
    """Return what is wrong with a file's code, apart from the units whose digests are exempt."""
    source = path.read_text(encoding="utf-8")
    file = path.relative_to(ROOT).as_posix()
    public_names = PUBLIC_NAMES.get(file, set())
    limits = limits_of(path)
    counts = tokens_by_line(source)
    measured: Lines = set()
    problems = []
    for unit in units_of(source):
        if unit.digest in exempt:
            continue
        measured |= unit.lines
        for name, line in unit.names:
            if name not in public_names:
                problems.append(f"vague name: {file}:{line} {name}; say what the value is")

    measured_counts = {line: count for line, count in counts.items() if line in measured}
    if is_dense(measured_counts.values(), limits):
        average = sum(measured_counts.values()) / len(measured_counts)
        long_lines = sorted(line for line, count in measured_counts.items() if count >= MANY_TOKENS)
        problems.append(
            f"dense: {file}: its new code has {average:.1f} tokens a line (at most "
            f"{limits.tokens_per_line}), and lines of {MANY_TOKENS} tokens and more at {long_lines[:12]} (at most "
            f"{limits.percent_of_long_lines:.0f} %)"
        )
    return problems


def packed_digests(path: Path) -> set[str]:
    """Return the digests of a file's units that are over a limit."""
    source = path.read_text(encoding="utf-8")
    counts = tokens_by_line(source)
    digests = set()
    for unit in units_of(source):
        unit_counts = [count for line, count in counts.items() if line in unit.lines]
        average = sum(unit_counts) / max(len(unit_counts), 1)
        has_long_line = any(count >= MANY_TOKENS for count in unit_counts)
        if unit.names or has_long_line or average > limits_of(path).tokens_per_line:
            digests.add(unit.digest)
    return digests


def checked_files() -> list[Path]:
    """Return the files whose writing is checked: the package, its tests and the tools."""
    files: list[Path] = []
    for folder in ("flsv", "tests", "tools"):
        files += sorted((ROOT / folder).rglob("*.py"))
    return [path for path in files if not is_leaf(path)]


def is_leaf(path: Path) -> bool:
    """Return whether a file is of a method that somebody brought, or its test."""
    return path.parent.name == CONTRIB and path.stem != "__init__"


def words_of_pages() -> dict[str, int]:
    """Count the words of all pages, and of those that are guides."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in pages}
    guide_words = words[ROOT / "README.md"]
    for path, count in words.items():
        in_docs = "docs" in path.relative_to(ROOT).parts
        if in_docs and path.parent.name not in NO_GUIDES and not path.name.startswith("benchmark"):
            guide_words += count
    return {"words of all pages": sum(words.values()), "words of guides": guide_words}


def words_of_docstrings(sources: Iterable[str]) -> int:
    """Count the words of the docstrings of classes and functions."""
    total = 0
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                total += len((ast.get_docstring(node) or "").split())
    return total


#: The classes of the first page, and their files.
CLASSES = {
    "FederationConfig": "configuration/federation_config.py",
    "FederatedDataModule": "data/datamodule.py",
}


def long_signatures() -> list[str]:
    """Return which class of the first page has too many arguments."""
    problems = []
    for name, file in CLASSES.items():
        source = (ROOT / "flsv" / file).read_text(encoding="utf-8")
        constructor = defined(defined(ast.parse(source), name), "__init__")
        arguments = constructor.args
        count = len(arguments.args) + len(arguments.kwonlyargs) - 1  # self
        if count > ARGUMENTS:
            problems.append(f"more than {ARGUMENTS} arguments: {name} ({count})")
    return problems


def defined(node: Any, name: str) -> Any:
    """Return the class or the function of a name in the body of a module or a class."""
    return next(child for child in node.body if getattr(child, "name", "") == name)


def room_of(path: Path, folder: Path) -> str:
    """Return the package below a folder in which a file lies, or "." beside them."""
    if path.parent == folder:
        return "."
    return path.relative_to(folder).parts[0]


def print_rooms(
    folder: Path,
    counts: dict[Path, Counter[int]],
) -> None:
    """Print tokens and density of a folder and of each folder in it."""
    rooms: dict[str, list[int]] = {}
    files = Counter[str]()
    for path, tokens in counts.items():
        room = room_of(path, folder)
        rooms.setdefault(room, []).extend(tokens.values())
        files[room] += 1

    all_lines = [count for room_lines in rooms.values() for count in room_lines]
    print(f"{'':20} {'tokens':>8} {'files':>6} {'a line':>7} {'long, %':>8}")
    for room, room_lines in [
        (folder.name, all_lines),
        *sorted(rooms.items(), key=lambda item: -sum(item[1])),
    ]:
        if not room_lines:
            continue
        file_count = files[room] if room in files else len(counts)
        average = sum(room_lines) / len(room_lines)
        long_lines = 100 * sum(count >= MANY_TOKENS for count in room_lines) / len(room_lines)
        print(f"{room:20} {sum(room_lines):8,} {file_count:6} {average:7.1f} {long_lines:8.1f}")


@dataclass(frozen=True)
class Facts:
    """What is counted of a file, and what is wrong with its writing."""

    lines: int
    counts: Counter[int]
    docstring_words: int
    problems: list[str]


class Cache:
    """Facts of files that have not changed since they were counted, so that a small change is counted in seconds."""

    file = ROOT / ".size_cache.pickle"

    def __init__(self) -> None:
        self._exempt = set(RECORD.read_text().split())
        self._words = words_of_glossary()
        rules = (Path(__file__).read_bytes(), sys.version, sorted(self._exempt), self._words)
        self._rules = repr(rules).encode()
        self._facts_before: dict[str, Facts] = {}
        self._facts: dict[str, Facts] = {}
        if self.file.exists():
            self._facts_before = pickle.loads(self.file.read_bytes())

    def facts_of(self, path: Path) -> Facts:
        """Return the facts of a file, counted again if it has changed."""
        content = str(path).encode() + path.read_bytes() + self._rules
        key = hashlib.sha256(content).hexdigest()
        if key in self._facts_before:
            self._facts[key] = self._facts_before[key]
        if key not in self._facts:
            self._facts[key] = self._counted(path)
        return self._facts[key]

    def _counted(self, path: Path) -> Facts:
        source = path.read_text(encoding="utf-8")
        problems = []
        if not is_leaf(path):
            problems += hard_to_read(path, self._exempt)
            if ROOT / "flsv" in path.parents:
                problems += other_words(path, self._words)
        return Facts(
            lines=source.count("\n"),
            counts=tokens_by_line(source),
            docstring_words=words_of_docstrings([source]),
            problems=problems,
        )

    def save(self) -> None:
        """Keep the facts of the files that were asked for."""
        self.file.write_bytes(pickle.dumps(self._facts))


def over_budget(facts: Mapping[Path, Facts]) -> list[str]:
    """Print rooms, wings and budgets of flsv, and return those that are exceeded."""
    problems = long_signatures()
    tokens_by_place = Counter[str]()
    for path, fact in facts.items():
        tokens_by_place[place_of(path)] += fact.counts.total()

    core_tokens = 0
    print(f"\nPython {sys.version.split()[0]}\n{'':20} {'now':>8} {'stood':>8}")
    places = {**house()["core"], **house()["wings"]}
    for name, described in places.items():
        tokens = tokens_by_place[name]
        stood = described["tokens"]
        print(f"{name:20} {tokens:8,} {stood:8,}   {described.get('page', 'core')}")
        problems += beyond(f"tokens of {name}", tokens, stood)
        if name in house()["core"]:
            core_tokens += tokens

    totals = {
        "tokens of flsv": tokens_by_place.total(),
        "tokens of the core": core_tokens,
        "words of docstrings": sum(fact.docstring_words for fact in facts.values()),
        **words_of_pages(),
    }
    print(f"{'':20} {'now':>8} {'stood':>8} {'aim':>8}")
    for name, (stood, aim) in BUDGETS.items():
        print(f"{name:20} {totals[name]:8,} {stood:8,} {aim:8,}")
        problems += beyond(name, totals[name], stood)
    return problems


def beyond(
    name: str,
    count: int,
    stood: int,
) -> list[str]:
    """Return a problem if a count is above what stood by more than the margin of ``house.yaml``."""
    limit = int(stood * (1 + house()["margin"]))
    return [f"more than {limit:,} {name}: {count:,}"] if count > limit else []


def main() -> int:
    """The command line; with ``--check`` 1 where a limit is passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "flsv")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where something is over a limit"
    )
    parser.add_argument(
        "--record", action="store_true", help="drop the exemptions of code that is gone"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()

    if options.record:
        packed = set().union(*map(packed_digests, checked_files()))
        if RECORD.exists():
            packed &= set(RECORD.read_text().split())
        RECORD.write_text("\n".join(sorted(packed)) + "\n")
        print(f"{len(packed)} functions and statements are exempt")
        return 0

    cache = Cache()
    facts = {path: cache.facts_of(path) for path in sorted(folder.rglob("*.py"))}
    print_rooms(folder, {path: fact.counts for path, fact in facts.items()})
    problems = []
    for path, fact in facts.items():
        if fact.lines > LINES_OF_A_FILE:
            problems.append(f"more than {LINES_OF_A_FILE} lines: {path.relative_to(folder)}")
    if folder == ROOT / "flsv":
        problems += over_budget({path: facts[path] for path in facts if not is_leaf(path)})
        for path in checked_files():
            problems += cache.facts_of(path).problems
    cache.save()
    print("\n".join(problems), end="\n" if problems else "")
    return int(options.check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
