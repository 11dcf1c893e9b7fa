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
    value = {
        "a": [
            1,
            torch.arange(6).view(2, 3).T,
        ],
        "b": torch.tensor(2.0, dtype=torch.bfloat16),
    }
    same = OrderedDict(
        b=value["b"].clone(),
        a=[
            1,
            torch.arange(6).view(2, 3).T.contiguous(),
        ],
    )
    assert digest(value) == digest(same)
    assert (
        len(
            digest(
                torch.ones(
                    2,
                    dtype=torch.complex64,
                )
            )
        )
        == 32
    )
