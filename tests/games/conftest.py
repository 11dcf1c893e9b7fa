"""Tests that ask for several threads leave one, as conftest.py of the root has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The tiny reference models crawl when several intra-op threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
