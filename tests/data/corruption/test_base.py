"""The checks around a corruption of one's own."""

import torch

from flsv.data import Corruption
from flsv.data.corruption import some

X, Y = torch.zeros(6, 2), torch.arange(6) % 3


class Own(Corruption):
    def __init__(self, change, **choice):
        super().__init__(**choice)
        self.change = change

    def corrupt(self, x, y, num_classes, generator):
        return self.change(x, y)


def call(change):
    return Own(change)(X.clone(), Y.clone(), 3, torch.Generator())


def test_types_are_kept():
    x, y = call(lambda x, y: (x.double() + 1, y.int()))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64


def test_some():
    for count, rate, expected in ((10, 0.25, 3), (10, 0.0, 0), (10, 1.0, 10), (3, 0.1, 0), (0, 0.5, 0)):
        chosen = some(count, rate, torch.Generator().manual_seed(0))
        assert len(chosen) == len(chosen.unique()) == expected
