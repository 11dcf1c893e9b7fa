"""Pixels to normalized tensors."""

import numpy as np
import torch

from flsv.data.sources.base import image_tensor, tensor_set


def test_pixels_are_scaled_and_normalized_by_channel():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    images = image_tensor(pixels, mean, std)
    assert images.shape == (5, 3, 4, 6)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)


def test_grey_images_get_a_channel():
    assert image_tensor(torch.zeros(2, 4, 6, dtype=torch.uint8)).shape == (2, 1, 4, 6)


def test_labels_become_int64():
    _, label = tensor_set(torch.zeros(2, 1, 2, 2), [3, 4])[1]
    assert label.dtype == torch.int64
    assert int(label) == 4
