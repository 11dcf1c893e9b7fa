"""What several test modules share, each file named by what it holds."""

import inspect
from functools import wraps

import pytest
import torch

from flsv.utilities.errors import ConfigurationError


def refused(message):
    """Expect that what is done within is refused, with these words (a regular expression)."""
    return pytest.raises(ConfigurationError, match=message)


def warns(message):
    """Expect that what is done within warns its user, with these words (a regular expression)."""
    return pytest.warns(UserWarning, match=message)


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def record_calls(monkeypatch, owner, name):
    """Return a list to which each call of a function adds its name from now on."""
    function = inspect.getattr_static(owner, name)
    calls = []

    @wraps(function)
    def record_and_call(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, record_and_call)
    return calls
