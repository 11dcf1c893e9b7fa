"""Images by name, of archives and of folders, with or without a folder per client."""

import os
from functools import partial
from pathlib import Path

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
from helpers import refused, warns
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


#: The pixels of all images of a class.
GRAY_OF_CLASS = {"cat": 0, "dog": 51, "eel": 102, "yak": 9}


def write_images(class_folder, number):
    class_folder.mkdir(parents=True, exist_ok=True)
    pixels = np.full((6, 8, 3), GRAY_OF_CLASS[class_folder.name], np.uint8)
    for index in range(number):
        Image.fromarray(pixels).save(class_folder / f"{index}.png")


def write_image_folders(root, numbers_by_client=CLIENTS):
    """Write so many images of each class into a client's folder."""
    for client, numbers_by_class in numbers_by_client.items():
        for class_name, number in numbers_by_class.items():
            write_images(root / client / class_name, number)


set_up_images = partial(set_up_data, image_size=4, server_val=0.0)


def test_digits_holds_each_scikit_learn_digit_exactly_once():
    data = digits()

    rows = []
    for images, labels in (data.train.tensors, data.test.tensors):
        pixels = images.flatten(1) * 16  # scikit-learn's are 0 to 16
        rows += torch.column_stack([pixels, labels]).tolist()

    expected_pixels, expected_labels = load_digits(return_X_y=True)
    expected_rows = np.column_stack([expected_pixels, expected_labels])
    assert sorted(rows) == sorted(expected_rows.tolist())


def test_digits_has_a_fifth_of_each_class_as_test_samples():
    data = digits()

    _, train_labels = data.train.tensors
    _, test_labels = data.test.tensors
    test_sizes = torch.bincount(test_labels)
    class_sizes = test_sizes + torch.bincount(train_labels)
    test_shares = test_sizes / class_sizes
    assert (test_shares - 0.2).abs().max() < 0.01


def test_gaussians_lie_around_their_class_centers():
    features, labels = load_image_data("gaussians").train.tensors
    points = features[:, :2]

    assert torch.bincount(labels).tolist() == [1000] * 4
    for label, center in enumerate(CENTRES):
        mean = points[labels == label].mean(0)
        torch.testing.assert_close(mean, torch.tensor(center), atol=0.1, rtol=0)


def test_gaussians_have_two_coordinates_and_their_products():
    features, _ = gaussians().train.tensors
    x, y, x_squared, y_squared, product = features.T

    torch.testing.assert_close(x_squared, x * x)
    torch.testing.assert_close(y_squared, y * y)
    torch.testing.assert_close(product, x * y)


def test_gaussians_are_the_same_each_time_they_are_made():
    features, _ = gaussians().train.tensors
    features_again, _ = gaussians().train.tensors

    assert torch.equal(features_again, features)


@needs_data
@pytest.mark.parametrize(
    ("name", "num_train", "shape"),
    [
        pytest.param("mnist", 60000, (1, 28, 28), marks=pytest.mark.slow),
        ("fashion_mnist", 60000, (1, 28, 28)),
        pytest.param("cifar10", 50000, (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_real_images_are_complete_and_normalized(name, num_train, shape):
    _, directory, *_ = TORCHVISION_FACTS[name]
    if not (Path(ROOT) / directory).is_dir():
        pytest.skip(f"FLSV_DATA_ROOT has no {directory}")

    data = vision(name, ROOT)

    pixels, labels = data.train.tensors
    test_pixels, _ = data.test.tensors
    assert pixels.shape == (num_train, *shape)
    assert test_pixels.shape == (10000, *shape)
    assert torch.bincount(labels).min() >= 5000

    means_by_channel = pixels.mean((0, 2, 3))
    deviations_by_channel = pixels.std((0, 2, 3))
    assert means_by_channel.abs().max() < 1e-3
    assert (deviations_by_channel - 1).abs().max() < 2e-3


LENGTHS_OF_SPLITS = {"train": 12, "val": 5, "test": 6}


def make_arrays(shape=(8, 8), dtype=np.uint8):
    """Images and a column of labels for each split, by the names of an npz archive."""
    generator = np.random.default_rng(0)
    named_arrays = {}
    for split, length in LENGTHS_OF_SPLITS.items():
        pixels = generator.integers(0, 256, (length, *shape))
        labels = np.arange(length) % 3
        named_arrays[f"{split}_images"] = pixels.astype(dtype)
        named_arrays[f"{split}_labels"] = labels[:, None].astype(np.uint8)
    return named_arrays


@pytest.fixture
def read_archive(tmp_path):
    """A function that writes arrays into an npz archive and reads it."""

    def write_and_read(named_arrays):
        path = tmp_path / "set.npz"
        np.savez(path, **named_arrays)
        return npz(path)

    return write_and_read


def unchanged(pixels):
    return pixels


def scale_from_minus_one_to_one(pixels):
    return pixels / 255 * 2 - 1


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "image_shape"),
    [
        ((8, 9), np.uint8, scale_from_minus_one_to_one, (1, 8, 9)),
        ((8, 9, 3), np.uint8, scale_from_minus_one_to_one, (3, 8, 9)),
        ((8, 9, 3), np.float64, unchanged, (3, 8, 9)),
    ],
)
def test_npz_images_have_their_channels_first(shape, dtype, scale, image_shape, read_archive):
    named_arrays = make_arrays(shape, dtype)

    image, _ = read_archive(named_arrays).train[4]

    channels_last = named_arrays["train_images"][4].reshape(8, 9, -1)
    pixels = np.moveaxis(channels_last, source=-1, destination=0)
    assert image.shape == image_shape
    assert image.is_contiguous()
    np.testing.assert_allclose(image.numpy(), scale(pixels), atol=1e-6)


def test_npz_splits_have_the_labels_of_their_columns(read_archive):
    named_arrays = make_arrays()

    data = read_archive(named_arrays)

    for split in LENGTHS_OF_SPLITS:
        _, labels = getattr(data, split).tensors
        assert labels.dtype == torch.int64
        assert labels.tolist() == named_arrays[f"{split}_labels"].flatten().tolist()


@pytest.mark.parametrize(
    ("wrong_arrays", "message"),
    [
        (
            {"train_labels": np.zeros((12, 14))},
            r"train_labels are float64 \[12, 14\].*one whole number for each",
        ),
        ({"train_images": np.zeros((12, 8, 8, 5))}, r"images are float64 \[8, 8, 5\] and uint8"),
        ({"train_labels": np.array([{}] * 12, dtype=object)}, "Object arrays cannot be loaded"),
    ],
)
def test_npz_archive_with_wrong_arrays_is_refused(read_archive, wrong_arrays, message):
    with refused(message):
        read_archive({**make_arrays(), **wrong_arrays})


def test_npz_archive_without_all_arrays_is_refused(read_archive):
    named_arrays = make_arrays()
    del named_arrays["train_labels"]
    del named_arrays["test_images"]

    with refused("no array train_labels, test_images. Its arrays are"):
        read_archive(named_arrays)


def test_images_of_a_folder_are_resized_and_scaled(tmp_path):
    cats_and_dogs = {"cat": 3, "dog": 3}
    write_image_folders(tmp_path, {"train": cats_and_dogs, "test": cats_and_dogs})

    data = folder(tmp_path, image_size=8)

    last_image, last_label = data.train[5]
    gray_of_dogs = GRAY_OF_CLASS["dog"] / 255
    torch.testing.assert_close(last_image, torch.full((3, 8, 8), gray_of_dogs))
    assert data.class_names[last_label] == "dog"
    assert data.class_names == ("cat", "dog")
    assert len(data.train) == 6
    assert len(data.test) == 6
    assert data.val is None


def write_page(path):
    path.write_bytes(b"<html>404</html>")


def write_16_bit_pixels(path):
    Image.fromarray(np.full((10, 10), 300, np.uint16)).save(path)


@pytest.mark.parametrize(
    ("write_file", "message"),
    [(write_page, "identify image file"), (write_16_bit_pixels, "more than 8 bits per pixel")],
)
def test_file_that_cannot_be_read_as_an_8_bit_image_is_refused(tmp_path, write_file, message):
    write_images(tmp_path / "dog", number=2)
    write_file(tmp_path / "dog" / "x.png")

    with refused(rf"dog/x.png cannot be read as an image: .*{message}"):
        list(folder(tmp_path).train)


def test_folder_without_images_has_a_warning_and_is_a_class(tmp_path):
    write_images(tmp_path / "cat", number=6)
    write_images(tmp_path / "dog", number=6)
    (tmp_path / "notes").mkdir()

    with warns("folders without images: 'notes'"):
        data = set_up_images(str(tmp_path))
    assert data.num_classes == 3


def test_image_folders_of_other_test_classes_are_refused(tmp_path):
    write_image_folders(tmp_path, {"train": {"cat": 3, "dog": 3}, "test": {"dog": 3}})

    with refused(r"test has the classes \['dog'\], but train has \['cat', 'dog'\]"):
        folder(tmp_path)


def test_class_numbers_of_image_folders_by_client_agree_among_clients(tmp_path):
    write_image_folders(tmp_path)
    (tmp_path / "README.txt").write_text("photographs")

    data = set_up_images(str(tmp_path))

    assert data.client_names == ("Boston", "clinic 2", "clinic 10", "Lyon")
    assert data.class_names == ("cat", "dog", "eel")
    grays = torch.tensor([GRAY_OF_CLASS[name] for name in data.class_names])
    for client, client_name in enumerate(data.client_names):
        expected_counts = [CLIENTS[client_name].get(name, 0) for name in data.class_names]
        assert data.class_counts[client].tolist() == expected_counts
        for images, labels in data.client_loader(client):
            first_pixels = 255 * images[:, 0, 0, 0]
            torch.testing.assert_close(first_pixels, grays[labels].float())


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

    with refused(message):
        set_up_images(str(tmp_path), **options)


def test_folders_val_and_test_belong_to_the_server(tmp_path):
    held_out = {"test": {"dog": 3}, "val": {"cat": 2, "eel": 2}}
    write_image_folders(tmp_path, {**CLIENTS, **held_out})

    data = set_up_images(str(tmp_path), server_val=0.1)

    cat, dog, eel = range(3)
    ((_, validation_labels),) = data.val_dataloader()
    ((_, test_labels),) = data.test_dataloader()
    assert data.num_clients == 4
    assert len(data.server_val_indices) == 0
    assert validation_labels.tolist() == [cat, cat, eel, eel]
    assert test_labels.tolist() == [dog, dog, dog]


def test_image_folders_without_a_client_are_refused(tmp_path):
    write_image_folders(tmp_path, {"val": {"cat": 2}, "test": {"cat": 2}})

    with refused("too few clients: none. .*val, test"):
        set_up_images(str(tmp_path))


def test_test_data_beside_a_folder_of_test_images_are_refused(tmp_path):
    write_image_folders(tmp_path, {**CLIENTS, "test": {"dog": 3}})
    images = torch.zeros(2, 3, 4, 4)

    with refused("the source has its own test data"):
        set_up_images(str(tmp_path), test=(images, [0, 1]))


def test_test_images_of_a_class_that_no_client_has_are_refused(tmp_path):
    write_image_folders(tmp_path, {**CLIENTS, "test": {"yak": 1}})

    with refused("test data have classes that no client has: yak"):
        set_up_images(str(tmp_path))


def test_images_by_class_alone_are_partitioned(tmp_path):
    write_image_folders(tmp_path)
    partitioner = DirichletPartitioner(2, alpha=9.0)

    data = set_up_images(str(tmp_path / "Boston"), server_val=0.2, partitioner=partitioner)

    assert data.num_clients == 2
    assert data.class_names == ("cat", "dog")
    with refused("has no test data"):
        data.test_dataloader()


def test_client_without_folders_of_classes_is_refused(tmp_path):
    write_image_folders(tmp_path)
    write_images(tmp_path / "cat", number=2)

    with refused("contains Boston, .*Expected images"):
        set_up_images(str(tmp_path))


def test_client_whose_folder_is_empty_is_refused(tmp_path):
    write_image_folders(tmp_path)
    (tmp_path / "Paris").mkdir()

    with refused("client 'Paris': .*Paris' was not found, or cannot be read"):
        set_up_images(str(tmp_path))
