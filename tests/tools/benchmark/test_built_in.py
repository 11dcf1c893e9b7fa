"""BuiltInData: what is merged, thinned out and scaled, and what is refused."""

import numpy as np
import torch
from scipy.stats import zscore
from sklearn.datasets import load_diabetes, load_digits
from torch.testing import assert_close

from benchmark.built_in import BuiltInData
from helpers import refused


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


def test_diabetes_is_scaled_by_its_training_rows():
    data = BuiltInData("diabetes", val_fraction=0.25)
    features, targets = data.train_set.tensors

    assert targets.dtype == torch.float32

    for columns in (features, targets[:, None]):
        num_columns = columns.shape[1]
        means = columns.mean(0)
        deviations = columns.std(0, correction=0)
        assert_close(
            means,
            torch.zeros(num_columns),
            atol=1e-5,
            rtol=0,
        )
        assert_close(deviations, torch.ones(num_columns))

    # The same numbers, moved and scaled: nothing lost, nothing twice.
    scaled = torch.cat([targets, data.val_set.tensors[1]]).numpy()
    raw = load_diabetes().target

    np.testing.assert_allclose(
        np.sort(zscore(scaled)),
        np.sort(zscore(raw)),
        atol=1e-4,
    )


def test_built_in_data_with_wrong_arguments_is_refused():
    with refused("it has none"):
        BuiltInData("diabetes", merge=2)
    with refused("each of 10 classes"):
        BuiltInData("digits", keep=[1.0, 0.5])
