"""One thread: small tensors do not gain from more, and the bit-for-bit tests need the same number everywhere. The same
random numbers in every test, whichever tests have run before it."""

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what pandas, torchvision and modules of users draw from)
    torch.manual_seed(0)
