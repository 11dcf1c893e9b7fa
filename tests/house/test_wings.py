"""The core imports no wing, by no import and by no text that names a module; wings do not import each other."""

import ast
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from house import PACKAGE, house, place_of, wing_of_module

ROOT = PACKAGE.parent
#: Wings whose code needs another one's.
PERMITTED = {
    ("kit", "methods"),  # it checks a strategy under published attacks
    ("own loops", "methods"),  # flsv value computes FedBary
}


@pytest.fixture(scope="module")
def graph():
    grimp = pytest.importorskip("grimp")
    return grimp.build_graph("flsv", cache_dir=None)


def modules_of_files():
    for path in sorted(PACKAGE.rglob("*.py")):
        if "templates" not in path.parts:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts).removesuffix(".__init__")


def test_core_imports_no_wing(graph):
    wrong = []
    for module in sorted(graph.modules):
        if wing_of_module(module) is None:
            for imported in graph.find_modules_directly_imported_by(module):
                if wing_of_module(imported) is not None:
                    wrong.append(f"{module} -> {imported}")

    assert wrong == []


def modules_of_exported_names():
    """The module of each name that a package loads when it is asked for, ``{(package, name): module}``."""
    modules = {}
    for path in PACKAGE.rglob("__init__.pyi"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                for imported in node.names:
                    modules[package, imported.name] = f"{package}.{node.module}"
    return modules


@pytest.mark.slow
def test_core_imports_nothing_of_a_wing_from_a_package():
    modules = modules_of_exported_names()
    wrong = []
    for path, module in modules_of_files():
        if wing_of_module(module) is not None:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            for imported in node.names:
                imported_module = modules.get((node.module, imported.name))
                if imported_module is not None and wing_of_module(imported_module) is not None:
                    wrong.append(f"{module} -> {imported_module}")

    assert wrong == []


def named_modules(source):
    """The modules of flsv that texts of code name, as in "flsv.privacy:warn_of_noise". Docstrings are no code."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            module, _, _ = node.value.partition(":")
            if module.startswith("flsv.") and " " not in module:
                yield module


def module_at(name):
    """The longest part of a dotted name that is a module of flsv."""
    parts = name.split(".")
    while len(parts) > 1:
        path = ROOT.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").exists():
            break
        parts.pop()
    return ".".join(parts)


@pytest.mark.slow
def test_core_names_no_module_of_a_wing_in_a_text():
    wrong = []
    for path, module in modules_of_files():
        if wing_of_module(module) is None:
            for name in named_modules(path.read_text(encoding="utf-8")):
                if wing_of_module(module_at(name)) is not None:
                    wrong.append(f"{module}: {name}")

    assert wrong == []


def test_wings_import_each_other_only_where_it_is_permitted(graph):
    wrong = set()
    for module in sorted(graph.modules):
        wing = wing_of_module(module)
        for imported in graph.find_modules_directly_imported_by(module):
            imported_wing = wing_of_module(imported)
            arrow = (wing, imported_wing)
            if None not in arrow and wing != imported_wing and arrow not in PERMITTED:
                wrong.add(f"{module} -> {imported}")

    assert wrong == set()


def test_modules_import_each_other_in_no_circle(graph):
    imported_modules = {}
    for module in graph.modules:
        imported_modules[module] = graph.find_modules_directly_imported_by(module)

    TopologicalSorter(imported_modules).prepare()  # raises an error that names a circle


def test_each_file_belongs_to_a_room_or_a_wing():
    places = {*house()["core"], *house()["wings"]}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).with_suffix("").as_posix()
        assert place_of(file) in places


def test_house_page_has_each_room_and_each_wing_with_its_page():
    page = (ROOT / "docs/explanation/house.md").read_text(encoding="utf-8")
    for room, described in house()["core"].items():
        folders = [folder for folder in described["folders"] if folder != "."]
        assert f"| {room} | " in page
        assert all(f"`{folder}`" in page for folder in folders)
    for wing, described in house()["wings"].items():
        assert f"| {wing} | " in page
        assert f"(../{described['page']})" in page


#: Tests that need no wing.
TESTS_OF_CORE = (
    "tests/core/test_parameters.py",
    "tests/data/test_loaders.py",
    "tests/federation/test_callbacks.py",
    "tests/federation/test_without_classes.py",
    "tests/games/test_coalition.py",
    "tests/results/test_run_table.py",
    "tests/training/test_counters.py",
    "tests/values/test_query.py",
)


#: And a slow one, of the default of ShadowShapley.
FILE_AT_ONCE = "tests/retraining/test_at_once.py"
SELECTED = "not slow or (test_coalitions_at_once and regression)"


@pytest.fixture
def core_alone(tmp_path):
    """A copy of the package without the folders of its wings, and the tests."""
    folder = tmp_path / "core"
    folder.mkdir()
    folders = []
    for wing in house()["wings"].values():
        for pattern in wing["files"]:
            if pattern.endswith("/.*"):
                folders.append(pattern.removesuffix("/.*"))
    shutil.copytree(PACKAGE, folder / "flsv", ignore=shutil.ignore_patterns("__pycache__"))
    for name in folders:
        shutil.rmtree(folder / "flsv" / name)
    for name in ("tests", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_core_passes_its_tests_without_the_folders_of_wings(core_alone):
    environment = {**os.environ, "PYTHONPATH": f"{core_alone}{os.pathsep}{core_alone / 'tests'}"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", "-k", SELECTED]
    command = [sys.executable, "-m", "pytest", *options, *TESTS_OF_CORE, FILE_AT_ONCE]
    completed = subprocess.run(
        command, cwd=core_alone, env=environment, capture_output=True, text=True, check=False
    )

    assert completed.returncode == 0, completed.stdout[-3000:]
