"""What is not collected where an extra is missing, in which order files are run at the same time, and when garbage is
looked for."""

import gc

import pytest
from lightning_utilities.core.imports import RequirementCache

pytest_plugins = ["processor_seconds", "rows"]

collect_ignore_glob = [
    "flsv/sites/templates/flower/*",
    "flsv/sites/templates/nvflare/*",
]
if not RequirementCache("flwr"):
    collect_ignore_glob += [
        "flsv/sites/flower*.py",
        "flsv/outside/flower.py",
        "tests/outside/server_app.py",
    ]
if not RequirementCache("nvflare"):
    collect_ignore_glob += ["flsv/sites/nvflare.py", "tests/sites/nvflare/jobs.py"]

gc.disable()  # while they are imported


def pytest_collection_finish() -> None:
    """Look for garbage from here on, but never among the million objects that were imported, which live to the end."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option renews the files that tests compare pages with: git shows what has changed."""
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew")


def pytest_configure(config: pytest.Config) -> None:
    """In the order of the folders: by their number of tests, files of one long test would come last, when the other
    workers have nothing left."""
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False
