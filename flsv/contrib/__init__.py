"""Contributed methods: one file for each, with its paper and its owner.

Nothing else in flsv imports these files. CONTRIBUTING.md says what a file must contain. A method that several
federations have used can move to the package of its kind.

Tier: contrib.
"""

import re
from pathlib import Path

import lazy_loader

_CLASS_NAME_PATTERN = re.compile(r"^class ([A-Z]\w*)", flags=re.MULTILINE)


def _classes_by_module() -> dict[str, list[str]]:
    """Return the public classes of each file, ``{module: classes}``, without importing it."""
    folder = Path(__file__).parent
    classes = {}
    for path in sorted(folder.glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        classes[path.stem] = _CLASS_NAME_PATTERN.findall(source)
    return classes


_CLASSES_BY_MODULE = _classes_by_module()
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_CLASSES_BY_MODULE)
