"""One thread: small tensors do not gain from more, and the bit-for-bit tests need the same number everywhere. The same
random numbers in every test, whichever tests have run before it. What every small fit would pay for again is paid for
once."""

import functools
import importlib.metadata
import logging
import os
import random
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# Tests kill processes and not machines: what was written is there without waiting for the disk.
os.fsync = lambda number: None

entry_points = importlib.metadata.entry_points


@functools.cache
def entry_points_of(path, **selection):
    return entry_points(**selection)


def cached_entry_points(**selection):
    """Lightning looks through the metadata of all installed packages whenever a trainer is made."""
    return entry_points_of(tuple(sys.path), **selection)


importlib.metadata.entry_points = cached_entry_points


def pytest_collection_finish():
    """Half of the federations have these digits, which scikit-learn reads from text. It is not imported here: in which
    order libraries first name a union of types decides how a configuration's numbers are read."""
    if "flsv.data.datamodule" in sys.modules:
        sources = importlib.import_module("flsv.data.sources.names_and_paths")
        sources.load_pixels = functools.cache(sources.load_pixels)


@pytest.fixture(scope="session", autouse=True)
def empty_working_folder(tmp_path_factory):
    """A coalition works in a folder with a link to each file of the working folder. The repository has 1,500."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working"))
        yield


@pytest.fixture(scope="module", autouse=True)
def program_of_one_module(request):
    """The other tests' modules are no part of the program, as if each module were tested in a process of its own. The
    globals of 300 modules would be looked at for each model that is scored."""
    program_state = sys.modules.get("flsv.isolation.program_state")
    if program_state is None:
        yield
        return
    other_modules = set()
    for name in sys.modules.keys() - {request.module.__name__}:
        _, _, last_name = name.rpartition(".")
        if last_name.startswith("test_"):
            other_modules.add(name)
    with pytest.MonkeyPatch.context() as patch:
        names = program_state._INSTALLED_NAMES | other_modules
        patch.setattr(program_state, "_INSTALLED_NAMES", names)
        yield


@contextmanager
def messages_restored():
    """Restore what a command hides of the messages of the whole process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    format_warning = warnings.formatwarning
    yield
    warnings.formatwarning = format_warning
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def same_messages_after_a_module():
    """Fixtures of a module run commands before the first test, which this test's own fixture cannot undo."""
    with messages_restored():
        yield


@pytest.fixture(autouse=True)
def same_messages():
    with messages_restored():
        yield


@pytest.fixture(autouse=True)
def same_draws():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what pandas, torchvision and modules of users draw from)
    torch.manual_seed(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)  # which seed_everything leaves there
