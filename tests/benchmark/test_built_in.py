"""BuiltInData: what is merged, thinned out and scaled, and what is refused."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits

from flsv.benchmark.built_in import BuiltInData
from flsv.utilities.errors import ConfigurationError


def test_built_in_digits_merge_and_thin_out_classes_in_training_and_validation() -> None:
    data = BuiltInData("digits", merge=6, keep=[1.0, 0.5, 0.5, 0.5, 0.25], val_fraction=0.4)
    counts = [
        torch.bincount(each.tensors[1], minlength=5) for each in (data.train_set, data.val_set)
    ]
    target = load_digits().target
    expected = [
        int((target < 6).sum()),
        *(round(share * (target == c).sum()) for c, share in zip((6, 7, 8), [0.5] * 3)),
    ]
    assert (counts[0] + counts[1]).tolist() == [*expected, round(0.25 * (target == 9).sum())]
    share = counts[1] / (counts[0] + counts[1])
    assert ((share - 0.4).abs() < 0.02).all()


def test_diabetes_is_scaled_by_its_training_rows() -> None:
    data = BuiltInData("diabetes", val_fraction=0.25)
    features, targets = data.train_set.tensors
    assert targets.dtype == torch.float32
    for columns in (features, targets[:, None]):
        torch.testing.assert_close(
            columns.mean(0), torch.zeros(columns.shape[1]), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(columns.std(0, correction=0), torch.ones(columns.shape[1]))
    both = torch.cat([targets, data.val_set.tensors[1]]).numpy()
    raw = load_diabetes().target
    # The same numbers, moved and scaled: nothing lost, nothing twice.
    np.testing.assert_allclose(
        np.sort((both - both.mean()) / both.std()),
        np.sort((raw - raw.mean()) / raw.std()),
        atol=1e-4,
    )


def test_built_in_data_with_wrong_arguments_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="it has none"):
        BuiltInData("diabetes", merge=2)
    with pytest.raises(ConfigurationError, match="each of 10 classes"):
        BuiltInData("digits", keep=[1.0, 0.5])
