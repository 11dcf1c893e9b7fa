"""Arrays and pixels as data sets."""

import numpy as np
import pytest
import torch

from flsv.data.sources.arrays import array_set, is_pair_of_arrays
from flsv.data.sources.base import image_tensor
from flsv.errors import ConfigurationError


def test_types():
    x, y = array_set(np.ones((3, 2)), np.array([[1], [0], [2]])).tensors
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, [1, 0, 2])
    assert array_set(np.ones((3, 2), np.int32)).tensors[0].dtype == torch.int64
    assert array_set(torch.ones(3, 2, dtype=torch.float64), [0.5, 1, 2]).tensors[1].tolist() == [0.5, 1, 2]
    assert array_set(torch.ones(2, 2), torch.ones(2, 3)).tensors[1].shape == (2, 3)
    assert array_set(np.arange(4.0).reshape(2, 2).astype(">f4")).tensors[0].tolist() == [[0, 1], [2, 3]]
    assert array_set(np.ones((4, 2))[::-1], [True, False] * 2).tensors[1].tolist() == [1, 0, 1, 0]


def test_pixels():
    (grey,) = array_set(np.full((2, 5, 4), 255, np.uint8)).tensors
    assert (grey.shape, grey.max().item()) == ((2, 1, 5, 4), 1.0)
    (colors,) = array_set(np.full((2, 5, 4, 3), 51, np.uint8)).tensors
    assert (colors.shape, colors.max().item()) == ((2, 3, 5, 4), pytest.approx(0.2))


def test_words_are_classes_in_sorted_order():
    data = array_set(np.zeros((3, 1)), np.array(["well", "ill", "well"], dtype=object))
    assert (data.classes, data.tensors[1].tolist()) == (("ill", "well"), [1, 0, 1])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), [1, 2], r"X has 3 entries and y the shape \[2\]"),
        (np.array([["a"]]), [1], r"X is <U1 \[1, 1\]; numbers"),
        (np.float64(1), None, "X is float64 \\[\\]"),
        (np.zeros((2, 1)), [0.5, np.nan], "none of them NaN or infinite"),
        (np.zeros((2, 1)), np.array(["a", None], object), r"y is object"),
        (np.zeros((2, 1)), np.array([["a", "b"], ["a", "b"]]), "Classes are whole numbers or words"),
    ],
)
def test_refused(x, y, message):
    with pytest.raises(ConfigurationError, match=message):
        array_set(np.asarray(x), y)


def test_what_is_a_pair():
    x, y = np.zeros((2, 3)), np.zeros(2)
    assert is_pair_of_arrays((x, y))
    assert is_pair_of_arrays([torch.zeros(2), ["a", "b"]])
    assert not is_pair_of_arrays(((x, y), (x, y)))
    assert not is_pair_of_arrays((x, [y, y]))
    assert not is_pair_of_arrays((x, torch.utils.data.TensorDataset(torch.zeros(2))))
    assert not is_pair_of_arrays((x, y, x))


def test_pixels_are_scaled_and_normalized_by_channel():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    images = image_tensor(pixels, mean, std)
    assert images.shape == (5, 3, 4, 6)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
