"""What is imported: by whom, and whether the package says that it needs it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def imported() -> dict[str, list[str]]:
    """Third-party packages by name, and the files that import them."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            else:
                continue
            for name in (
                {name.split(".")[0] for name in names}
                - set(sys.stdlib_module_names)
                - {"flsv", "__main__"}
            ):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def declared() -> set[str]:
    text = (ROOT.parent / "pyproject.toml").read_text()
    lists = re.findall(
        r"^(?:dependencies|privacy|flower|lora|parquet|testing) = \[(.*?)\]$",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert len(lists) == 6
    return {
        name.lower()
        for text_of_list in lists
        for name in re.findall(r'"([A-Za-z][\w.-]*)', text_of_list)
    }


def test_imported_packages_are_exactly_the_declared_dependencies() -> None:
    mine = {DISTRIBUTIONS.get(name, name).lower(): files[0] for name, files in imported().items()}
    assert mine.keys() <= declared(), mine
    assert declared() - mine.keys() == {"pyarrow"}  # pandas imports it


@pytest.mark.slow
def test_functional_imports_neither_scikit_learn_nor_pandas() -> None:
    """POT imports both: a third of the seconds that it takes."""
    heavy = "{'ot', 'sklearn', 'pandas'} & set(sys.modules)"
    given = [sys.executable, "-c", f"import sys, flsv.functional; print({heavy})"]
    assert subprocess.run(given, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_packages_of_sites_are_imported_without_torch() -> None:
    """Flower starts a process for every message to a site, which must not wait for torch."""
    code = "import sys, flsv.engines; print({'torch', 'lightning'} & set(sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "set()\n"


#: Requirements of flsv by its name alone, in a command or in the dependencies of a package.
BY_NAME = (
    r"""pip3? install(?: +-\S+| +[\w.-]+(?= ))* +['"]?flsv(?![\w/.])[^\n`]*""",
    r"""^(?:dependencies|requires) *= *\[[^\]]*?["']flsv(?! *@)[^\]]*""",
)


def test_no_file_says_to_install_flsv_by_its_name() -> None:
    """It is on no index: who registers the name there would run code wherever it is installed so."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and name != "CHANGELOG.md"]
    texts = {name: (ROOT.parent / name).read_bytes().decode(errors="replace") for name in names}
    del texts[str(Path(__file__).relative_to(ROOT.parent))]
    found = {
        n: m[0]
        for n, text in texts.items()
        for p in BY_NAME
        if (m := re.search(p, text, flags=re.MULTILINE))
    }
    assert found == {}
