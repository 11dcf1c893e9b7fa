"""What several test modules share, each file named by what it holds."""

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
