"""What is imported: by whom, and whether the package says that it needs it."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flsv

ROOT = Path(flsv.__file__).parent
#: Distributions by what is imported, where the names differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "annotated_types": "annotated-types",
    "dp_accounting": "dp-accounting",
    "lazy_loader": "lazy-loader",
    "lightning_utilities": "lightning-utilities",
    "ot": "pot",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def imported():
    """Third-party packages by name, and the files that import them."""
    files_by_package = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            else:
                continue
            packages = {name.split(".")[0] for name in names}
            for name in packages - set(sys.stdlib_module_names) - {"flsv", "__main__"}:
                files_by_package.setdefault(name, []).append(str(path.relative_to(ROOT)))

    return files_by_package


#: Extras of packages that flsv imports.
EXTRAS = ("privacy", "flower", "nvflare", "lora", "parquet", "testing")


def declared():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return {Requirement(text).name.lower() for text in requirements}


@pytest.mark.slow
def test_imported_packages_are_exactly_the_declared_dependencies():
    packages = set()
    for name in imported():
        packages.add(DISTRIBUTIONS.get(name, name).lower())
    assert packages == declared(), imported()


@pytest.mark.slow
def test_functional_imports_neither_scikit_learn_nor_pandas():
    """POT imports both: a third of the seconds that it takes."""
    heavy = "{'ot', 'sklearn', 'pandas'} & set(sys.modules)"
    program = f"import sys, flsv.functional; print({heavy})"
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )

    assert process.stdout == "set()\n"


def test_packages_of_sites_are_imported_without_torch():
    """Flower starts a process for every message to a site, which must not wait for torch."""
    code = "import sys, flsv.sites; print({'torch', 'lightning'} & set(sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "set()\n"
