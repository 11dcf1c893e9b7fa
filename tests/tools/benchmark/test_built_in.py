"""BuiltInData: what is merged, thinned out and scaled, and what is refused."""

import torch
from sklearn.datasets import load_digits

from benchmark.built_in import BuiltInData


def test_built_in_digits_merge_and_thin_out_classes_in_training_and_validation():
    shares = [1.0, 0.5, 0.5, 0.5, 0.25]
    data = BuiltInData("digits", merge=6, keep=shares, val_fraction=0.4)

    train_counts, val_counts = [
        torch.bincount(dataset.tensors[1], minlength=5)
        for dataset in (data.train_set, data.val_set)
    ]

    target = load_digits().target
    expected = [int((target < 6).sum())]
    for digit, share in zip((6, 7, 8, 9), shares[1:]):
        expected.append(round(share * (target == digit).sum()))

    assert (train_counts + val_counts).tolist() == expected

    val_share = val_counts / (train_counts + val_counts)
    assert ((val_share - 0.4).abs() < 0.02).all()
