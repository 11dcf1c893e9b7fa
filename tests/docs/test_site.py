"""The pages that are made, and the table that they are made of; what pages show of the code is the code's."""

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import docs_site
import pytest

from flsv import FederatedLoop

ROOT = Path(__file__).parents[2]
ENTRY = """
    # title: its name
    # papers: ["[authors, venue year](address)"]
    # gives: what it gives
    # not_for: when not to use it"""


def test_every_configuration_is_of_one_algorithm():
    listed = [config for algorithm in docs_site.algorithms() for config in algorithm.configs]
    assert len(listed) == len(set(listed)) >= 40, "a configuration is in two entries"
    for config in listed:
        assert (ROOT / f"configs/{config}.yaml").is_file(), f"configs: an entry names {config}"

    for config in docs_site.without_entry():
        pytest.fail(f"configs/{config}.yaml: add to the comment at its top:{ENTRY}")


def test_paths_named_in_pages_exist():
    """Those of the tree, or of the package's rooms; but for scripts of an earlier commit, which are named with it."""
    pages = {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tools").rglob("*.md"),
    }
    # `flsv/data/splits.py`, `data/splits.py` or `tests/*/conftest.py`, but without its end.
    folders = [path for path in (ROOT / "flsv").iterdir() if path.is_dir()]
    packages = "|".join(folder.name for folder in folders)
    path_in_code = rf"`((?:flsv|tests|tools|configs|examples|clients|loop|{packages})/[\w./*]+)"
    # commit 0a1b2c3d's `tools/old.py`
    path_of_the_past = r"[Cc]ommit\s\w{8}'s\s`[^`]*`"
    examples = ("configs/NAME.yaml", "data/partition")
    broken = []
    count = 0
    for page in pages - {ROOT / "CHANGELOG.md"}:
        text = re.sub(path_of_the_past, "", page.read_text())
        for path in re.findall(path_in_code, text):
            count += 1
            files = [*ROOT.glob(path), *(ROOT / "flsv").glob(path)]
            if not files and path not in examples:
                broken.append(f"{page.relative_to(ROOT)}: {path}")

    assert count > 100
    assert broken == []


def test_names_that_readers_look_up_are_defined_where_the_page_says():
    page = (ROOT / "docs/explanation/concepts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", page, flags=re.MULTILINE)
    misplaced = []
    for name, path in rows:
        file = ROOT / "flsv" / path
        source = file.read_text() if file.is_file() else ""
        definition = rf"^\s*((class|def) {name}\b|(self\.)?{name}(: [^=]+)? = )|\"{name}\""
        if not re.search(definition, source, flags=re.MULTILINE):
            misplaced.append(f"{name}: {path}")

    assert len(rows) > 150
    assert misplaced == []


def test_architecture_page_lists_the_layers_of_the_import_contract():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    contract = project["tool"]["importlinter"]["contracts"][0]
    page = (ROOT / "docs/explanation/house.md").read_text()
    section = page.split("## Packages")[1].split("\n## ")[0]

    packages_of_rows = []
    for line in section.splitlines():
        if line.startswith("| `"):
            first_cell = line.split("|")[1]
            packages_of_rows.append(re.findall(r"`(\w+)`", first_cell))

    layers = [re.findall(r"flsv\.(\w+)", layer) for layer in contract["layers"]]
    assert packages_of_rows == layers


#: The target of [text](target#section), unless it has a scheme, as https: has, or is a section of the same page.
RELATIVE_LINK = re.compile(r"\]\(((?!\w+:|#)[^)\s#]+)")


def test_files_linked_from_pages_exist():
    generated = set(docs_site.generated_pages())
    generated |= {f"notebooks/{path.stem}.md" for path in docs_site.docs_render.LESSONS}
    generated_paths = {(ROOT / "docs" / page).as_posix() for page in generated}
    broken_links = []
    pages = {
        *ROOT.glob("*.md"),
        ROOT / "tools" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    }
    # Sections of released versions stay as they were.
    pages.remove(ROOT / "CHANGELOG.md")

    for page in sorted(pages):
        for target in RELATIVE_LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if not path.exists() and path.as_posix() not in generated_paths:
                broken_links.append(f"{page.relative_to(ROOT)}: {target}")

    assert broken_links == []


def exported_by(package):
    """The names that a package exports, without its subpackages and its version."""
    module = importlib.import_module(package)
    names = []
    for name in module.__all__:
        if name != "__version__" and not inspect.ismodule(getattr(module, name)):
            names.append(name)
    return names


def pages_with_heading(pages, path):
    """Those pages on which a class or function has its section."""
    heading = re.compile(rf"^::: {re.escape(path)}$", re.MULTILINE)
    return [page for page, text in pages.items() if heading.search(text)]


def test_the_reference_has_everything_that_is_exported():
    reference_pages = {}
    for page, text in docs_site.generated_pages().items():
        if page.startswith("reference/"):
            reference_pages[page] = text

    for package in docs_site.PACKAGES:
        names = docs_site.public_names(package)
        if package not in ("flsv.sites.flower", "flsv.sites.nvflare"):  # import networks
            assert exported_by(package) == names

        for name in names:
            path = docs_site.defined_at(f"{package}.{name}")
            assert f'identifier="{path}"' in reference_pages["reference/api.md"]

            expected_page = f"reference/{package}.md"
            if name in docs_site.metrics():
                expected_page = f"reference/metrics/{name}.md"
            assert pages_with_heading(reference_pages, path) == [expected_page], name

    assert "flsv.metrics" in docs_site.PACKAGES


@pytest.mark.parametrize("name", docs_site.metrics())
def test_metric_docstring_has_formula_shapes_and_when_not_to_use_it(name):
    metrics = importlib.import_module("flsv.metrics")
    text = inspect.getdoc(getattr(metrics, name)) or ""
    assert ".. math::" in text
    assert re.search(r"\[num_clients|\[n\]|a scalar", text)
    assert re.search(r"^When not to use it:\n    [A-Z]", text, flags=re.MULTILINE)


def test_the_index_by_question_has_every_metric_once():
    metrics = importlib.import_module("flsv.metrics")
    exported = {*metrics.__all__} - {"ContributionMetric"}
    for name in exported:
        file = "flsv/metrics/__init__.py: add to a line of its docstring"
        assert docs_site.metrics().count(name) == 1, f"{file}, once: - Which question? {name}."

    assert {*docs_site.metrics()} <= exported

    page = docs_site.generated_pages()["reference/flsv.metrics.md"]
    assert all(page.count(f"](metrics/{name}.md)") == 1 for name in exported)


@pytest.mark.parametrize("name", ["round", "value", "site_answer"])
def test_journeys_in_the_docs_name_classes_where_they_are_and_methods_that_they_have(name):
    page = (ROOT / f"docs/explanation/{name}.md").read_text()
    _, _, code_block = page.partition("```text\n")
    tree, _, _ = code_block.partition("```")
    # A line is "Class.method   path/of/module.py   description".
    calls = re.findall(r"^ *(\w+)\.(\w+)(.*)$", tree, flags=re.MULTILINE)
    assert len(calls) > 10

    classes = {}
    for class_name, method, rest_of_line in calls:
        # Only the first line of a class has a path.
        path = re.search(r"([\w/]+)\.py", rest_of_line)
        if path is not None:
            module_name = path[1].replace("/", ".")
            module = importlib.import_module(f"flsv.{module_name}")
            classes[class_name] = getattr(module, class_name)
        assert callable(getattr(classes[class_name], method)), (class_name, method)


def test_house_page_has_each_entry_of_a_loops_checkpoint():
    page = (ROOT / "docs/explanation/house.md").read_text()
    section = page.split("## What a checkpoint has")[1]

    entries = []
    for line in section.splitlines():
        if line.startswith("| `"):
            first_cell = line.split("|")[1]
            entries += re.findall(r"`(\w+)`", first_cell)

    assert sorted(entries) == sorted(FederatedLoop().state_dict())


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="flsv[docs] is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert built.returncode == 0, built.stderr[-2000:]
    assert (tmp_path / "index.html").is_file()
