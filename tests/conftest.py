"""One thread: small tensors do not gain from more, and the bit-for-bit tests need the same number everywhere."""

import torch

torch.set_num_threads(1)
