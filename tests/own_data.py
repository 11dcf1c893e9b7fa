"""A user's own data, small."""

import numpy as np
import torch
from frames import Frame
from torch.utils.data import Dataset, TensorDataset

X = np.random.default_rng(0).normal(size=(60, 4))
Y = np.arange(60) % 3
WORDS = np.array(["cat", "dog", "eel"])
HERE = TensorDataset(torch.tensor(X).float(), torch.tensor(Y))


class Items(Dataset):
    """Hands out samples that are not held as tensors, counts how often, and has whatever attributes it is given."""

    def __init__(self, items, **attributes):
        self.items, self.reads = list(items), 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


def rows(length=30, **attributes):
    return Items([(torch.full((4,), float(index)), index % 3) for index in range(length)], **attributes)


def patients(number, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    return Frame(
        age=(rng.normal(50 + shift, 9, number)).tolist(),
        ward=[["A", "B", f"only {seed}"][i % 3] for i in range(number)],
        ill=(np.arange(number) % 2).tolist(),
    )
