"""A user's own data, small."""

import numpy as np
import torch
from frames import Frame
from torch.utils.data import Dataset, TensorDataset

X = np.random.default_rng(0).normal(size=(60, 4))
Y = np.arange(60) % 3
WORDS = np.array(["cat", "dog", "eel"])
HERE = TensorDataset(torch.tensor(X).float(), torch.tensor(Y))


class Rows(Dataset):
    """Samples that are not held as tensors."""

    def __init__(self, length=30, **attributes):
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 3


def patients(number, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    return Frame(
        age=(rng.normal(50 + shift, 9, number)).tolist(),
        ward=[["A", "B", f"only {seed}"][i % 3] for i in range(number)],
        ill=(np.arange(number) % 2).tolist(),
    )
