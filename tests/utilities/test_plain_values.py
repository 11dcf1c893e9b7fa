"""Hashes of nested values: equal for equal values only."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from flsv.utilities.plain_values import are_equal, digest

ZEROS = torch.zeros(4)
NO_ENTRIES = ZEROS[:0]
LARGE_ARRAY = np.zeros(2000)
ONE_IN_THE_MIDDLE = np.zeros(2000)
ONE_IN_THE_MIDDLE[1000] = 1
PAIRS = {
    "a type": (1, True),
    "a fraction": (1, 1.0),
    "a text": (1, "1"),
    "nothing": (None, "None"),
    "where a text ends": (
        ["a", "bc"],
        ["ab", "c"],
    ),
    "where a list ends": (
        [["a"], "b"],
        [["a", "b"]],
    ),
    "what a text imitates": (
        ["a", "b"],
        "a1:str 3:'b'",
    ),
    "a list": ([1], (1,)),
    "a name": (
        {"a": 1},
        {"b": 1},
    ),
    "a name's type": (
        {1: 0},
        {"1": 0},
    ),
    "a tensor's name": (
        {"ab": ZEROS},
        {"a": ZEROS},
    ),
    "a tensor's shape": (ZEROS, ZEROS.view(2, 2)),
    "a tensor's type": (ZEROS, ZEROS.int()),
    "a tensor's sign of 0": (ZEROS, -ZEROS),
    "where a tensor ends": (
        [ZEROS[:1], ZEROS[:3]],
        [ZEROS[:3], ZEROS[:1]],
    ),
    "the middle of a large array": (LARGE_ARRAY, ONE_IN_THE_MIDDLE),
    "no tensor": (NO_ENTRIES, NO_ENTRIES.view(0, 2)),
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
    same_matrix = matrix.contiguous()
    same = OrderedDict(b=scalar.clone(), a=[1, same_matrix])
    assert digest(value) == digest(same)

    complex_numbers = torch.ones(2, dtype=torch.complex64)
    assert len(digest(complex_numbers)) == 32


def test_hash_of_a_single_entry_does_not_depend_on_its_stride():
    matrix = torch.arange(12.0).view(4, 3)
    entry_of_a_column = matrix[2:3, 1]
    same_entry = torch.tensor([7.0])
    assert digest(entry_of_a_column) == digest(same_entry)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("make_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_equal_by_their_entries(make_sparse):
    ring = torch.eye(4).roll(1, 0)
    sparse = make_sparse(ring)

    assert are_equal(sparse, make_sparse(ring.clone()))
    for unequal_matrix in (2 * ring, ring.T, ring.double(), torch.eye(5)):
        assert not are_equal(sparse, make_sparse(unequal_matrix))
    assert not are_equal(sparse, ring)
