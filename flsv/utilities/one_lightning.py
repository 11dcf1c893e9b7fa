"""import_as_lightning, for packages that import ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from flsv.utilities.errors import ConfigurationError

_OTHER_PACKAGE = "pytorch_lightning"
_PACKAGE = "lightning.pytorch"


def import_as_lightning() -> None:
    """Let ``import pytorch_lightning`` give ``lightning.pytorch``, in this process and from now on.

    The two packages have the same classes twice, and a Trainer of one refuses modules of the other. Call this before
    you import a package whose modules are of ``pytorch_lightning``, such as schnetpack or darts.

    Raises:
        ConfigurationError: ``pytorch_lightning`` has been imported before.

    Example:
        >>> import flsv
        >>> flsv.import_as_lightning()
        >>> import lightning, pytorch_lightning
        >>> pytorch_lightning.LightningModule is lightning.LightningModule
        True
    """
    module = sys.modules.get(_OTHER_PACKAGE)
    if module is not None and module.__name__ != _PACKAGE:
        raise ConfigurationError(
            "pytorch_lightning is imported already, and its classes are in use. Call flsv.import_as_lightning() before "
            "the first import of a package that uses it."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finder that answers for ``pytorch_lightning`` and its modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, submodule = fullname.partition(".")
        if package != _OTHER_PACKAGE:
            return None
        name = f"{_PACKAGE}.{submodule}" if submodule else _PACKAGE
        spec = find_spec(name)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _SameModule(name), is_package=is_package)


class _SameModule(Loader):
    """Loader that gives the module of another name, unchanged."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has replaced it.
        module.__spec__ = self._own_spec
