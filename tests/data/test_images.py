"""Images by name, of archives and of folders, with or without a folder per client."""

import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from flsv.data import DirichletPartitioner, load_image_data
from flsv.data.sources.names_and_paths import (
    CENTRES,
    TORCHVISION_FACTS,
    digits,
    folder,
    gaussians,
    npz,
    vision,
)
from flsv.utilities.errors import ConfigurationError
from helpers import warns
from helpers.data import set_up_data

ROOT = os.environ.get("FLSV_DATA_ROOT")
needs_data = pytest.mark.skipif(
    ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data"
)
CLIENTS = {
    "Boston": {"cat": 6, "dog": 4},
    "Lyon": {"dog": 8},
    "clinic 10": {"cat": 5},
    "clinic 2": {"eel": 5, "dog": 1},
}


def write_images(folder, number, value, side=6):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        pixels = np.full((side, side + 2, 3), value, np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


GRAY_OF_CLASS = {"cat": 0, "dog": 51, "eel": 102}
GRAY_OF_OTHER_CLASSES = 9


def write_image_folders(root, clients=CLIENTS):
    """A class is told by its brightness."""
    for client, classes in clients.items():
        for name, number in classes.items():
            gray = GRAY_OF_CLASS.get(name, GRAY_OF_OTHER_CLASSES)
            write_images(root / client / name, number, gray)
    return root


deal = partial(set_up_data, image_size=4, server_val=0.0)


def test_digits_holds_each_scikit_learn_digit_exactly_once():
    data = digits()
    images = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    labels = torch.cat([data.train.tensors[1], data.test.tensors[1]])
    pixels = images.flatten(1) * 16  # scikit-learn's are 0 to 16
    rows = torch.cat([pixels, labels[:, None]], dim=1)

    expected_pixels, expected_labels = load_digits(return_X_y=True)
    expected_rows = np.column_stack([expected_pixels, expected_labels])
    test_shares = torch.bincount(data.test.tensors[1]) / torch.bincount(labels)
    assert sorted(rows.tolist()) == sorted(expected_rows.tolist())
    assert (test_shares - 0.2).abs().max() < 0.01


def test_gaussians_lie_around_their_class_centers():
    data = load_image_data("gaussians")

    features, labels = data.train.tensors
    points = features[:, :2]
    x, y = points.T
    products = torch.stack([x * x, y * y, x * y], dim=1)
    torch.testing.assert_close(features[:, 2:], products)
    assert torch.bincount(labels).tolist() == [1000] * 4
    for label, center in enumerate(CENTRES):
        mean = points[labels == label].mean(0)
        torch.testing.assert_close(mean, torch.tensor(center), atol=0.1, rtol=0)
    assert torch.equal(features, gaussians().train.tensors[0])


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "shape"),
    [
        pytest.param("mnist", 60000, (1, 28, 28), marks=pytest.mark.slow),
        ("fashion_mnist", 60000, (1, 28, 28)),
        pytest.param("cifar10", 50000, (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_real_images_are_complete_and_normalized(name, train, shape):
    _, directory = TORCHVISION_FACTS[name][:2]
    if not os.path.isdir(os.path.join(ROOT, directory)):
        pytest.skip(f"FLSV_DATA_ROOT has no {directory}")

    data = vision(name, ROOT)

    pixels, labels = data.train.tensors
    assert pixels.shape == (train, *shape)
    assert data.test.tensors[0].shape == (10000, *shape)
    assert torch.bincount(labels).min() >= 5000

    # The constants are those of the training pixels if these now have mean 0 and deviation 1, by channel.
    means = pixels.mean((0, 2, 3))
    deviations = pixels.std((0, 2, 3))
    assert means.abs().max() < 1e-3
    assert (deviations - 1).abs().max() < 2e-3


def make_arrays(shape=(8, 8), dtype=np.uint8):
    rng = np.random.default_rng(0)
    named_arrays = {}
    for split, length in (("train", 12), ("val", 5), ("test", 6)):
        images = rng.integers(0, 256, (length, *shape))
        named_arrays[f"{split}_images"] = images.astype(dtype)
        labels = (np.arange(length) % 3)[:, None]
        named_arrays[f"{split}_labels"] = labels.astype(np.uint8)

    return named_arrays


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 9), np.uint8, (1, 8, 9)),
        ((8, 9, 3), np.uint8, (3, 8, 9)),
        ((8, 9, 3), np.float64, (3, 8, 9)),
        ((8, 9), np.float64, (1, 8, 9)),
    ],
)
def test_npz_arrays_become_images_and_labels(tmp_path, shape, dtype, expected):
    named_arrays = make_arrays(shape, dtype)
    np.savez(tmp_path / "set.npz", **named_arrays)
    data = npz(tmp_path / "set.npz")

    assert [
        len(part)
        for part in (
            data.train,
            data.val,
            data.test,
        )
    ] == [12, 5, 6]

    image, label = data.train[4]
    assert image.shape == expected
    assert image.is_contiguous()
    assert label.dtype == torch.int64
    assert int(label) == 1

    pixels = named_arrays["train_images"][4].reshape(8, 9, -1).transpose(2, 0, 1)
    if dtype == np.uint8:
        pixels = pixels / 255 * 2 - 1

    np.testing.assert_allclose(image.numpy(), pixels, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"train_labels": np.zeros((12, 14))},
            r"train_labels are float64 \[12, 14\].*one whole number for each",
        ),
        ({"train_images": np.zeros((12, 8, 8, 5))}, r"images are float64 \[8, 8, 5\] and uint8"),
        (
            {"train_labels": None, "test_images": None},
            "no array train_labels, test_images. Its arrays are",
        ),
        ({"train_labels": np.array([{}] * 12, dtype=object)}, "Object arrays cannot be loaded"),
    ],
)
def test_npz_archive_with_wrong_arrays_is_refused(tmp_path, changed, message):
    named_arrays = {**make_arrays(), **changed}
    for name, array in changed.items():
        if array is None:
            del named_arrays[name]

    np.savez(tmp_path / "set.npz", **named_arrays)
    with pytest.raises(ConfigurationError, match=message):
        npz(tmp_path / "set.npz")


def test_images_of_a_folder_are_resized_and_scaled(tmp_path):
    write_image_folders(
        tmp_path,
        {
            "train": {"cat": 3, "dog": 3},
            "test": {"cat": 3, "dog": 3},
        },
    )

    data = folder(tmp_path, image_size=8)

    image, label = data.train[5]
    assert image.shape == (3, 8, 8)
    assert image.flatten().tolist() == pytest.approx([0.2] * 3 * 8 * 8)  # a dog's brightness
    assert label == 1
    assert data.class_names == ("cat", "dog")
    assert len(data.train) == 6
    assert len(data.test) == 6
    assert data.val is None


def write_page(path):
    path.write_bytes(b"<html>404</html>")


def write_pixels(path, dtype):
    above_8_bits = 300
    Image.fromarray(np.full((10, 10), above_8_bits, dtype)).save(path)


@pytest.mark.fast_rows("x.png-write_file1-more than 8 bits per pixel")
@pytest.mark.parametrize(
    ("name", "write_file", "message"),
    [
        ("x.png", write_page, "identify image file"),
        ("x.png", partial(write_pixels, dtype=np.uint16), "more than 8 bits per pixel"),
    ],
)
def test_a_file_that_cannot_be_read_as_an_8_bit_image_is_named(tmp_path, name, write_file, message):
    write_images(tmp_path / "dog", number=2, value=51)
    write_file(tmp_path / "dog" / name)

    with pytest.raises(
        ConfigurationError, match=rf"dog/{name} cannot be read as an image: .*{message}"
    ):
        list(folder(tmp_path).train)


def test_class_without_images_is_named_and_stays_a_class(tmp_path):
    write_images(tmp_path / "cat", number=6, value=0)
    write_images(tmp_path / "dog", number=6, value=51)
    (tmp_path / "notes").mkdir()

    with warns("folders without images: 'notes'"):
        data = deal(str(tmp_path))
    assert data.num_classes == 3


def test_image_folders_of_other_test_classes_are_refused(tmp_path):
    write_image_folders(
        tmp_path,
        {
            "train": {"cat": 3, "dog": 3},
            "test": {"dog": 3},
        },
    )

    with pytest.raises(
        ConfigurationError, match=r"test has the classes \['dog'\], but train has \['cat', 'dog'\]"
    ):
        folder(tmp_path)


def test_class_numbers_of_image_folders_by_client_agree_among_clients(tmp_path):
    root = write_image_folders(tmp_path)
    (root / "README.txt").write_text("photographs")

    data = deal(str(tmp_path))

    assert data.client_names == ("Boston", "clinic 2", "clinic 10", "Lyon")
    assert data.class_names == ("cat", "dog", "eel")
    for name, counts in zip(data.client_names, data.class_counts.tolist()):
        assert counts == [CLIENTS[name].get(animal, 0) for animal in data.class_names]
    for client in range(4):
        for images, labels in data.client_loader(client):
            brightness = images[:, 0, 0, 0]
            # Values 0, 51 and 102 of 255.
            torch.testing.assert_close(brightness, 0.2 * labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"partitioner": DirichletPartitioner(2, alpha=1.0)},
            "by client .*Remove DirichletPartitioner",
            id="partitioner",
        ),
        pytest.param(
            {"groups": "ward"},
            "contains the data of each client, so that groups is not used",
            id="groups",
        ),
    ],
)
def test_image_folders_by_client_are_not_divided_otherwise(tmp_path, options, message):
    write_image_folders(tmp_path)

    with pytest.raises(ConfigurationError, match=message):
        deal(str(tmp_path), **options)


def test_folders_val_and_test_belong_to_the_server(tmp_path):
    write_image_folders(
        tmp_path,
        {
            **CLIENTS,
            "test": {"dog": 3},
            "val": {"cat": 2, "eel": 2},
        },
    )

    data = deal(str(tmp_path), server_val=0.1)

    validation_labels = torch.cat([y for _, y in data.val_dataloader()])
    test_labels = torch.cat([y for _, y in data.test_dataloader()])
    assert data.num_clients == 4
    assert len(data.server_val_indices) == 0
    assert validation_labels.tolist() == [0, 0, 2, 2]  # cats and eels
    assert test_labels.tolist() == [1, 1, 1]  # dogs


@pytest.mark.parametrize("held_out_names", [["val"], ["test"], ["val", "test"]])
def test_image_folders_without_a_client_are_refused(tmp_path, held_out_names):
    write_image_folders(tmp_path, {name: {"cat": 2, "dog": 2} for name in held_out_names})

    with pytest.raises(ConfigurationError, match="too few clients: none. .*" + held_out_names[-1]):
        deal(str(tmp_path))


def test_test_data_beside_a_folder_of_test_images_are_refused(tmp_path):
    write_image_folders(tmp_path, {**CLIENTS, "test": {"dog": 3}})
    images = torch.zeros(2, 3, 4, 4)

    with pytest.raises(ConfigurationError, match="the source has its own test data"):
        deal(str(tmp_path), test=(images, [0, 1]))


def test_test_images_of_a_class_that_no_client_has_are_refused(tmp_path):
    write_image_folders(tmp_path, {**CLIENTS, "test": {"yak": 1}})

    with pytest.raises(ConfigurationError, match="test data have classes that no client has: yak"):
        deal(str(tmp_path))


def test_image_folder_without_splits_is_split(tmp_path):
    write_image_folders(tmp_path)
    partitioner = DirichletPartitioner(2, alpha=9.0)

    data = deal(str(tmp_path / "Boston"), server_val=0.2, partitioner=partitioner)
    data_by_default = deal(str(tmp_path / "Boston"))

    assert data.num_clients == 2
    assert data.class_names == ("cat", "dog")
    assert data_by_default.num_clients == 5
    with pytest.raises(ConfigurationError, match="has no test data"):
        data.test_dataloader()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: write_images(p / "Lyon2", 2, 0), "contains Boston, .*Expected images"),
        (
            lambda p: (p / "Paris").mkdir(),
            "client 'Paris': .*Paris' was not found, or cannot be read",
        ),
        (
            lambda p: [shutil.rmtree(p / name) for name in CLIENTS if name != "Lyon"],
            "too few clients: Lyon. .* at least 2 clients",
        ),
    ],
)
def test_image_folder_with_wrong_contents_is_refused(tmp_path, change, message):
    change(write_image_folders(tmp_path))
    with pytest.raises(ConfigurationError, match=message):
        deal(str(tmp_path))
