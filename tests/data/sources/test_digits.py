"""scikit-learn's digits: a fixed, stratified split of all images."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from flsv.data.sources.named import digits


def test_train_and_test_are_all_images_once():
    data = digits()
    images = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    labels = torch.cat([data.train.tensors[1], data.test.tensors[1]])
    pixels, classes = load_digits(return_X_y=True)
    ours = sorted(map(tuple, np.column_stack([images.flatten(1).numpy() * 16, labels]).tolist()))
    assert ours == sorted(map(tuple, np.column_stack([pixels, classes]).tolist()))
    assert images.min() == 0
    assert images.max() == 1
    assert images.dtype == torch.float32


def test_split_is_stratified_and_fixed():
    first, second = digits(), digits()
    assert torch.equal(first.train.tensors[0], second.train.tensors[0])
    share = torch.bincount(first.test.tensors[1]) / torch.bincount(
        torch.cat([first.train.tensors[1], first.test.tensors[1]])
    )
    assert (share - 0.2).abs().max() < 0.01
    assert first.num_classes == len(first.class_names) == 10
    assert first.val is None
