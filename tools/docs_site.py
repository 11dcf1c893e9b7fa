"""The pages of the site that follow from something else: algorithms, the reference, the lists of pages.

As a hook of MkDocs (mkdocs.yml) it makes a page per algorithm out of ``configs/``, a page per package out of its
``__all__``, and the list of all public names, by the templates of ``pages/``. Nothing of that lies in the
repository, so nothing of it can be out of date.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import docs_render
import jinja2
import yaml

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
METRICS = "flsv.metrics"
CONTRIB = "flsv.contrib"
_QUESTION = re.compile(r"^- (.+?\?) (.+?)\.$", flags=re.MULTILINE | re.DOTALL)
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")),
    trim_blocks=True,
    lstrip_blocks=True,
)
#: Names of what goes down to clients, and of what they send up.
Messages = tuple[tuple[str, ...], tuple[str, ...]]
#: The line of a package's docstring that says what it promises.
_TIER = re.compile(r"^Tier: (stable|provisional|contrib)\.$", flags=re.MULTILINE)
#: The first line of an algorithm's entry, in the comment of its configuration.
_ENTRY = re.compile(r"^title: ", flags=re.MULTILINE)
#: The parts of a federation, and where a configuration names them.
PARTS = {
    "metric": ("federation", "metrics"),
    "aggregator": ("federation", "aggregator"),
    "personalizer": ("federation", "personalizer"),
    "sampler": ("federation", "sampler"),
    "client algorithm": ("federation", "client_algorithm"),
    "upload": ("federation", "uploads+"),
    "filter": ("federation", "filters"),
    "share": ("federation", "share"),
    "model": ("model",),
}
#: Parts whose docstrings an algorithm's page does not have.
_OF_OTHERS = ("share", "model")
#: Packages of the reference, in the order of the way of a round.
PACKAGES = {
    "flsv": "What most programs import",
    "flsv.data": "Data, partitions, corruptions",
    "flsv.tables": "Tables, their dictionaries, texts",
    "flsv.models": "Modules and networks",
    "flsv.training.algorithms": "Client algorithms",
    "flsv.uploads": "Compression",
    "flsv.attacks": "Attacks",
    "flsv.privacy": "Differential privacy",
    "flsv.core": "Rounds, participants, the messages between them",
    "flsv.sampling": "Client samplers",
    "flsv.games": "Coalitions and utilities",
    "flsv.metrics": "Contributions",
    "flsv.filters": "Filters of a cohort's updates",
    "flsv.aggregation": "Aggregators",
    "flsv.personalization": "Personalizers",
    "flsv.values": "Values from the files of coalitions",
    "flsv.valuation": "Valuation before training",
    "flsv.valuation.features": "Features for valuation",
    "flsv.server": "The server",
    "flsv.contrib": "Methods that others bring",
    "flsv.payment": "A run's folder, its report, shares of a budget",
    "flsv.engines.ranks": "Several processes",
    "flsv.sites": "Sites, on any network",
    "flsv.sites.flower": "Flower",
    "flsv.sites.nvflare": "NVIDIA FLARE",
    "flsv.testing": "Checks of parts of one's own",
    "flsv.functional": "The mathematics, as functions",
}


@dataclass(frozen=True)
class Algorithm:
    """The entry of an algorithm: YAML in the comment at the top of its configuration, from ``title: `` on.

    Args:
        title: its name.
        papers: links to its papers.
        gives: what it gives.
        not_for: when not to use it.
        configs: its configurations. The first one has the entry.
        needs: what it needs.
        results: pages of ``docs/results``.
        down: names of the tensors that the server sends to clients.
        up: names of the tensors that clients send.
    """

    title: str
    papers: list[str]
    gives: str
    not_for: str
    configs: list[str]
    needs: str = ""
    results: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=lambda: ["start"])
    up: list[str] = field(default_factory=lambda: ["update"])


def rendered(template: str, **given: Any) -> str:
    """Render a page; templates call the functions of this module, as ``site``."""
    return TEMPLATES.get_template(template).render(site=globals(), **given).rstrip() + "\n"


@cache
def algorithms() -> tuple[Algorithm, ...]:
    """Return all algorithms, by their titles."""
    entries = []
    for path in CONFIGS.glob("*.yaml"):
        text = comment(path.stem)
        entry = _ENTRY.search(text)
        if entry is not None:
            facts = yaml.safe_load(text[entry.start() :])
            try:
                entries.append(Algorithm(**{"configs": [path.stem], **facts}))
            except TypeError as error:
                raise ValueError(
                    f"configs/{path.name}: the entry in its comment: {error}. Write '# papers: [\"[Authors, venue]"
                    "(address)\"]' or '# papers: []', '# gives: ...' and '# not_for: ...' below '# title: ...'."
                ) from error
    entries.sort(key=lambda algorithm: algorithm.title.casefold())
    return tuple(entries)


def without_entry() -> list[str]:
    """Return the configurations that are neither of an algorithm nor bring data."""
    of_an_algorithm = set()
    for algorithm in algorithms():
        of_an_algorithm.update(algorithm.configs)

    names = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        options = yaml.safe_load(path.read_text())
        brings_data = "source" in options.get("data", {})
        if path.stem not in of_an_algorithm and not brings_data:
            names.append(path.stem)
    return names


def comment(config: str) -> str:
    """Return the comment at the top of a configuration."""
    lines = []
    for line in (CONFIGS / f"{config}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#")
        lines.append(text.removeprefix(" "))
    return "\n".join(lines)


def crossings() -> dict[Messages, list[str]]:
    """Return ``{(down, up): configurations}``, what crosses in each direction, the most frequent first."""
    configs: dict[Messages, list[str]] = {}
    for algorithm in algorithms():
        messages = (tuple(algorithm.down), tuple(algorithm.up))
        trained = [config for config in algorithm.configs if parts(config)]
        configs.setdefault(messages, []).extend(trained)
    most_frequent = sorted(configs, key=lambda messages: -len(configs[messages]))
    return {messages: configs[messages] for messages in most_frequent}


def in_code(names: Iterable[str]) -> str:
    """Write names in the type of code, or "nothing"."""
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def parts(config: str) -> dict[str, list[str]]:
    """Return what a configuration names, by part: class paths, and patterns where it says what is shared."""
    found: dict[str, list[str]] = {}
    whole = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for part, path in PARTS.items():
        node: Any = whole
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        named = list(_named(node))
        if part == "share" and node is not None:
            named = [str(each) for each in (node if isinstance(node, list) else [node])]
        if named:
            found[part] = named
    return found


def _named(node: Any) -> Iterator[str]:
    if isinstance(node, str) and node[:1].isupper() and node in _homes():
        yield _homes()[node]
    elif isinstance(node, dict):
        for value in node.values():
            yield from _named(value)
    elif isinstance(node, list):
        for value in node:
            yield from _named(value)


@cache
def _homes() -> dict[str, str]:
    """Return the path of each public name, which configurations leave out."""
    return {
        name: f"{package}.{name}"
        for package in reversed(PACKAGES)
        for name in public_names(package)
    }


def about(config: str) -> str:
    """Return the text at the top of a configuration, without the commands."""
    text = _ENTRY.split(comment(config), maxsplit=1)[0]
    text = re.sub(
        r"^(?:Composes with any data|Composes with any data of images):.*$",
        "",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^ +(?:flsv|--config) .*$", "", text, flags=re.MULTILINE)
    text = text.replace("Composes with any data of images:", "").strip()
    return re.sub(r"\s*[^.]*:$", "", re.sub(r"\n{2,}", "\n", text))


def algorithm_page(each: Algorithm) -> str:
    """Describe an algorithm: what it is, its parts, its configuration, its paper and results.

    The docstrings of its parts follow, with formulas, shapes and examples, of metrics also what the example draws.
    """
    named = {config: parts(config) for config in each.configs}
    shown: dict[str, None] = {}  # an ordered set
    for paths_by_part in named.values():
        for part, paths in paths_by_part.items():
            if part not in _OF_OTHERS:
                shown |= dict.fromkeys(paths)
    return rendered("algorithm.md", each=each, parts=named, shown=shown, metrics=metrics())


def body(config: str) -> str:
    """Return a configuration without its comments."""
    text = (CONFIGS / f"{config}.yaml").read_text()
    return "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip()


def reference(path: str, name: str) -> str:
    """Link a name to where it is described, if it is."""
    return f'<autoref identifier="{defined_at(path)}" optional><code>{name}</code></autoref>'


def title(name: str) -> str:
    """Return the title of a page of results."""
    return (
        (ROOT / "docs" / "results" / f"{name}.md").read_text().split("\n", 1)[0].removeprefix("# ")
    )


def page_of(each: Algorithm) -> str:
    """Return an algorithm's address on the site."""
    return f"algorithms/{each.configs[0]}.md"


def source_of(package: str) -> Path:
    """Return the file of a package or module."""
    path = ROOT / Path(*package.split("."))
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")


def tier(package: str) -> str:
    """Return what a package promises about its names, as its docstring says in a line of its own."""
    line = _TIER.search(docstring(package))
    if line is None:
        path = source_of(package).relative_to(ROOT)
        raise ValueError(
            f"{path}: add to its docstring the line Tier: stable, provisional or contrib."
        )
    return line[1]


def docstring(package: str) -> str:
    """Return the docstring of a package or module, without importing it."""
    return ast.get_docstring(ast.parse(source_of(package).read_text())) or ""


def public_names(package: str) -> list[str]:
    """Return ``__all__`` of a package or module, without importing what it names."""
    if package == CONTRIB:
        return list(importlib.import_module(package).__all__)
    source = source_of(package)
    stub = source.with_suffix(".pyi")
    if stub.exists():
        return names_of_stub(stub)

    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} has no __all__")


def defined_at(path: str) -> str:
    """Return where the reference's tool finds a name: contrib has no stub, so by the module that defines it."""
    package, _, name = path.rpartition(".")
    if package != CONTRIB:
        return path
    module = getattr(importlib.import_module(package), name).__module__
    return f"{module}.{name}"


def names_of_stub(stub: Path) -> list[str]:
    """Return the names that a package imports when they are first asked for, without its subpackages."""
    names = []
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module not in (None, "__about__"):
            names += [alias.name for alias in node.names]
    return sorted(names)


def metrics() -> list[str]:
    """Return the metrics that have a page of their own."""
    return [name for answers in questions().values() for name in answers]


# ---- a page per metric: its docstring, with what it draws of its own example


def questions() -> dict[str, list[str]]:
    """Return the names of the metrics that answer each question, as the package's docstring has them."""
    return {
        question: re.findall(r"\b[A-Z][a-zA-Z]+[a-z][A-Z]\w+\b", names)
        for question, names in _QUESTION.findall(docstring(METRICS))
    }


def metric_address(name: str) -> str:
    """Return a metric's address on the site."""
    return f"reference/metrics/{name}.md"


def metric_page(name: str) -> str:
    """Describe one metric."""
    question = next(question for question, names in questions().items() if name in names)
    return rendered("metric.md", name=name, question=question)


def drawn(name: str, folder: str = "") -> str:
    """Refer to the picture of a metric's example, in Markdown."""
    return f"![metric.plot() after the example of {name}]({folder}{name}.svg)"


# ---- the reference


def reference_page(package: str) -> str:
    """List everything that a package exports; metrics by question, with pages of their own."""
    asked = questions() if package == METRICS else {}
    names = [
        name for name in public_names(package) if not any(name in each for each in asked.values())
    ]
    return rendered(
        "package.md", package=package, what=PACKAGES[package], names=names, questions=asked
    )


def vocabulary_page() -> str:
    """List all attributes of a round, by the table that the code reads."""
    from flsv.core.vocabulary import REQUIREMENTS, VOCABULARY

    return rendered("vocabulary.md", vocabulary=VOCABULARY, requirements=REQUIREMENTS)


def generated_pages() -> dict[str, str]:
    """Return Markdown by address on the site."""
    pages = {
        "algorithms/index.md": rendered("algorithms.md", algorithms=algorithms()),
        "reference/api.md": rendered("api.md", packages=PACKAGES),
        "reference/round.md": vocabulary_page(),
        "reference/what_crosses.md": rendered("what_crosses.md", crossings=crossings()),
    }
    pages |= {page_of(algorithm): algorithm_page(algorithm) for algorithm in algorithms()}
    pages |= {f"reference/{package}.md": reference_page(package) for package in PACKAGES}
    pages |= {metric_address(name): metric_page(name) for name in metrics()}
    return pages


# ---- the hook of MkDocs


def on_config(config: Any) -> Any:
    """Add the pages that nobody has to list, and a link to the repository, once pyproject.toml names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if "urls" in project:
        config.repo_url = project["urls"]["Repository"]
        config.repo_name = "flsv"

    packages = [{package: f"reference/{package}.md"} for package in PACKAGES]
    metric_pages = [{name: metric_address(name)} for name in sorted(metrics())]
    made = {
        "Algorithms": [{algorithm.title: page_of(algorithm)} for algorithm in algorithms()],
        "Reference": [*packages, {"Metrics": metric_pages}],
    }
    for section in config.nav:
        for name, written_pages in section.items():
            if name in made:
                written_pages += made[name]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    for address, content in generated_pages().items():
        files.append(File.generated(config, address, content=content))
    for name in metrics():
        address = metric_address(name).replace(".md", ".svg")
        metric = getattr(importlib.import_module(METRICS), name)
        files.append(File.generated(config, address, content=docs_render.picture(metric)))
    for path in docs_render.LESSONS:
        files.append(
            File.generated(config, f"notebooks/{path.stem}.md", content=docs_render.page(path))
        )
    return files


#: How much a page counts in the search, by what its address begins with: guides before what is looked up, and last the
#: long tables of results, in which every word is.
BOOSTS = {
    "tutorials/": 8.0,
    "howto/": 4.0,
    "deployment": 4.0,
    "nvflare": 4.0,
    "gpu": 4.0,
    "scaling": 4.0,
    "notebooks/": 3.0,
    "trust": 2.0,
    "reliability": 2.0,
    "explanation/": 2.0,
    "reference/flsv": 0.5,
    "results/": 0.5,
    "benchmark": 0.1,
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that lead out of docs/ into words, and tell the search what counts."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
    return docs_render.inside_docs(markdown, page.file.src_uri)
