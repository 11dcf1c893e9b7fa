"""Hashes of nested values: equal for equal values only."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from flsv.utilities.plain_values import digest

ZEROS = torch.zeros(4)
PAIRS = {
    "a type": (1, True),
    "a fraction": (1, 1.0),
    "a text": (1, "1"),
    "nothing": (None, "None"),
    "where a text ends": (["a", "bc"], ["ab", "c"]),
    "where a list ends": ([["a"], "b"], [["a", "b"]]),
    "what a text imitates": (["a", "b"], "a1:str 3:'b'"),
    "a list": ([1], (1,)),
    "a name": ({"a": 1}, {"b": 1}),
    "a name's type": ({1: 0}, {"1": 0}),
    "a tensor's name": ({"ab": ZEROS}, {"a": ZEROS}),
    "a tensor's shape": (ZEROS, ZEROS.view(2, 2)),
    "a tensor's type": (ZEROS, ZEROS.int()),
    "a tensor's sign of 0": (ZEROS, -ZEROS),
    "where a tensor ends": ([ZEROS[:1], ZEROS[:3]], [ZEROS[:3], ZEROS[:1]]),
    "the middle of a large array": (np.zeros(2000), np.eye(1, 2000, 1000)[0]),
    "no tensor": (ZEROS[:0], ZEROS[:0].view(0, 2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_different_values_have_different_hashes(pair):
    a, b = PAIRS[pair]

    assert digest(a) != digest(b)
    assert digest([a]) != digest(a)


def test_equal_values_have_the_same_hash():
    matrix = torch.arange(6).view(2, 3).T
    scalar = torch.tensor(2.0, dtype=torch.bfloat16)
    value = {"a": [1, matrix], "b": scalar}
    same = OrderedDict(b=scalar.clone(), a=[1, matrix.contiguous()])
    assert digest(value) == digest(same)
    assert len(digest(torch.ones(2, dtype=torch.complex64))) == 32


def test_hash_of_a_single_entry_does_not_depend_on_its_stride():
    column = torch.arange(12.0).view(4, 3)[2:3, 1]
    assert digest(column) == digest(torch.tensor([7.0]))
