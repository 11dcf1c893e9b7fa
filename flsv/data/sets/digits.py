"""scikit-learn's embedded handwritten digits: 1,797 real 8x8 images, no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flsv.data.sets.base import ImageData, tensor_set


def digits() -> ImageData:
    """1,437 training and 360 test images ``[1, 8, 8]`` in 0 .. 1; the split is fixed and stratified.

    Example:
        >>> data = digits()
        >>> len(data.train), len(data.test), data.train[0][0].shape
        (1437, 360, torch.Size([1, 8, 8]))
    """
    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)
    sets = [
        tensor_set(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, y)
        for x, y in ((train_x, train_y), (test_x, test_y))
    ]
    return ImageData(sets[0], sets[1], None, 10, tuple(map(str, range(10))))
