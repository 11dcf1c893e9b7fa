"""What is not collected where an extra is missing, and in which order files are run at the same time."""

import gc

import pytest
from lightning_utilities.core.imports import RequirementCache

collect_ignore_glob = ["flsv/cli/templates/flower/*", "tests/engines/flower_app/*"]
if not RequirementCache("flwr"):
    collect_ignore_glob += ["flsv/engines/flower*.py", "flsv/outside/flower.py"]


gc.disable()  # until all is imported: tests/conftest.py


def pytest_configure(config: pytest.Config) -> None:
    """In the order of the folders: by their number of tests, files of one long test would come last, when the other
    workers have nothing left."""
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False
