"""The lowest versions that pyproject.toml allows, as constraints for pip.

python tools/lowest_versions.py > lowest.txt && pip install -c lowest.txt -e '.[test]'
"""

from __future__ import annotations

import re
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
#: Of tools that check or build and are not used by the package; the newest will do.
TOOLS = (
    "ruff",
    "mypy",
    "import-linter",
    "pytest",
    "pytest-cov",
    "pre-commit",
    "hatchling",
    "mkdocs",
    "mkdocs-material",
)
TOOLS += ("mkdocstrings", "mkdocs-autorefs", "latex2mathml", "check-jsonschema")
_REQUIREMENT = re.compile(r'[\[ ]"([A-Za-z][\w.-]*)(?:\[[\w,]*\])?>=([\d.]+)')


def lowest(text: str) -> dict[str, str]:
    """Package to its lowest version.

    Example:
        >>> lowest('dependencies = [\\n    "torch>=2.4",\\n    "rich>=13",\\n]\\nlora = ["peft>=0.11"]')
        {'torch': '2.4', 'rich': '13', 'peft': '0.11'}
    """
    found = _REQUIREMENT.findall(text)
    return {name: version for name, version in found if name not in TOOLS}


if __name__ == "__main__":
    for package, version in lowest(PYPROJECT.read_text()).items():
        print(f"{package}=={version}")
