"""Batches from tensors equal batches from a DataLoader, and follow from the generator alone; so do generators that
data hold. Whether two data sets of equal labels are the same, and whether their inputs are finite."""

import copy
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from flsv.data import IIDPartitioner, SizePartitioner, TensorBatches, make_loader
from flsv.data.division import not_finite
from flsv.data.loaders import preload
from flsv.data.sample_hashes import content_hash
from helpers import make_generator, refused
from helpers.data import DataModuleOfLoader, Items, set_up_data

X = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50)
TENSORS = TensorDataset(X, Y)


READ_ONE_BY_ONE = Items(zip(X, Y.tolist()))  # the same samples


def labels_by_batch(batches):
    return [y.tolist() for _, y in batches]


def no_generator():
    return None


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make_shuffling_generator", [no_generator, make_generator])
def test_tensor_batches_equal_those_of_a_data_loader_in_each_epoch(
    make_shuffling_generator, drop_last
):
    odd_indices = torch.arange(3, 40, 2)
    batches_by_dataset = []
    for dataset, loader_class in ((TENSORS, TensorBatches), (READ_ONE_BY_ONE, DataLoader)):
        generator = make_shuffling_generator()
        loader = make_loader(
            dataset, odd_indices, batch_size=4, drop_last=drop_last, generator=generator
        )
        assert isinstance(loader, loader_class)
        first_epoch = list(loader)
        second_epoch = list(loader)
        assert len(first_epoch) == len(loader)
        batches_by_dataset.append([*first_epoch, *second_epoch])

    tensor_batches, expected_batches = batches_by_dataset
    torch.testing.assert_close(tensor_batches, expected_batches, rtol=0, atol=0)


def test_tensor_batches_with_a_generator_have_another_order_in_each_epoch():
    batches = make_loader(TENSORS, batch_size=4, generator=make_generator())

    assert labels_by_batch(batches) != labels_by_batch(batches)


def load_shuffled_labels(dataset):
    loader = make_loader(dataset, batch_size=8, generator=make_generator(1))
    return labels_by_batch(loader)


@pytest.mark.parametrize("dataset", [TENSORS, READ_ONE_BY_ONE])
def test_loader_with_its_own_generator_neither_reads_nor_moves_the_global_one(dataset):
    state = torch.get_rng_state()
    labels = load_shuffled_labels(dataset)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(123)
    assert load_shuffled_labels(dataset) == labels


def test_subsets_of_subsets_are_read_as_tensors():
    samples_from_10_to_39 = Subset(TENSORS, range(10, 40))
    samples_15_10_and_39 = Subset(samples_from_10_to_39, [5, 0, 29])
    last_and_first = torch.tensor([2, 0])

    loader = make_loader(
        samples_15_10_and_39, last_and_first, batch_size=2, collate_fn=default_collate
    )

    assert isinstance(loader, TensorBatches)
    assert labels_by_batch(loader) == [[39, 15]]


def test_preloading_with_a_collate_function_is_refused():
    loader = DataLoader(READ_ONE_BY_ONE, shuffle=True, collate_fn=list)

    with refused("reads samples without the loader's collate_fn"):
        set_up_data(DataModuleOfLoader(loader), preload=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_preloaded_samples_are_in_order(workers):
    images, labels = preload(READ_ONE_BY_ONE, num_workers=workers).tensors

    assert torch.equal(images, X)
    assert torch.equal(labels, Y)


def test_tensors_are_preloaded_as_they_are():
    assert preload(TENSORS) is TENSORS


def test_samples_that_are_no_tuples_of_tensors_cannot_be_preloaded():
    with refused("samples that torch collates to a tuple of tensors, but those of Items"):
        preload(Items([{"x": 1}]))


class SixDraws(Dataset):
    """Draws a number whenever a sample is read."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.draw()


#: Functions that draw a number by a generator of their own.
MAKERS_OF_DRAWS = {
    "RandomState": lambda: np.random.RandomState(0).normal,
    "Generator": lambda: np.random.default_rng(1).normal,
    "Random": lambda: random.Random(1).random,
    "torch": lambda: partial(torch.rand, (), generator=torch.Generator()),
}


@pytest.mark.fast_rows("*-0", "torch-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("library", MAKERS_OF_DRAWS)
def test_generators_of_the_data_are_seeded_in_each_epoch_and_worker(library, workers):
    draw = MAKERS_OF_DRAWS[library]()
    numbers_by_seed = []
    for seed in (0, 0, 1):
        loader = make_loader(
            SixDraws(draw), batch_size=1, generator=make_generator(seed), num_workers=workers
        )
        numbers_by_seed.append(torch.cat(list(loader)).tolist())

    numbers, numbers_of_same_seed, numbers_of_other_seed = numbers_by_seed
    assert numbers_of_same_seed == numbers
    assert numbers_of_other_seed != numbers
    num_different = len(set(numbers))
    assert num_different == 6, "two workers draw the same"


SAMPLES_OF_CLIENTS = {"a": torch.tensor([0, 2, 4]), "b": torch.tensor([1, 3, 5])}


def changed_clients(hashes, new_hashes):
    """The names of clients whose samples differ."""
    assert hashes.keys() == new_hashes.keys()
    return [name for name, digest in hashes.items() if digest != new_hashes[name]]


def hashes_of_clients(dataset):
    return {name: content_hash(dataset, rows) for name, rows in SAMPLES_OF_CLIENTS.items()}


class MakesSamplesWhenRead(Dataset):
    """Six samples, made when they are read, and whatever attributes it is given."""

    factor = 1.0
    is_random = False
    has_been_read = False

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.has_been_read = True
        x = torch.tensor([self.factor * (index + 1)])
        if self.is_random:
            x += torch.rand(1)
        return {"x": x}, 0


@pytest.mark.parametrize("column", [np.arange(12.0).reshape(6, 2), torch.arange(6).bfloat16()])
def test_changed_array_of_a_custom_data_set_changes_the_hash_of_its_client(column):
    sample_of_b = 3
    equal_column = copy.deepcopy(column)
    changed_column = copy.deepcopy(column)
    changed_column[sample_of_b] = column[2]

    hashes = hashes_of_clients(MakesSamplesWhenRead(column=column))
    hashes_of_equal = hashes_of_clients(MakesSamplesWhenRead(column=equal_column))
    hashes_of_changed = hashes_of_clients(MakesSamplesWhenRead(column=changed_column))

    assert hashes_of_equal == hashes
    assert changed_clients(hashes, hashes_of_changed) == ["b"]


def test_custom_data_set_without_arrays_is_hashed_by_reading_samples():
    hashes = hashes_of_clients(MakesSamplesWhenRead())
    hashes_of_doubled = hashes_of_clients(MakesSamplesWhenRead(factor=2.0))

    assert changed_clients(hashes, hashes_of_doubled) == ["a", "b"]


def test_hashing_of_random_samples_leaves_no_changes_in_the_data_set():
    random_samples = MakesSamplesWhenRead(is_random=True)

    hashes = hashes_of_clients(random_samples)
    torch.rand(1)  # moves the global generator

    assert hashes_of_clients(random_samples) == hashes
    assert not random_samples.has_been_read


def save_gray_image(path, gray):
    pixels = np.full((4, 4), gray, np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def two_image_folders(tmp_path):
    """A folder with images of cats and dogs, and a copy of it."""
    original = tmp_path / "one"
    for name in ("cat", "dog"):
        (original / name).mkdir(parents=True)
        for i in range(3):
            save_gray_image(original / name / f"{i}.png", gray=10 * i)
    return original, shutil.copytree(original, tmp_path / "two")


def hashes_of_images(folder):
    return hashes_of_clients(ImageFolder(str(folder), transform=ToTensor()))


def test_hashes_of_image_files_do_not_depend_on_their_folder(two_image_folders):
    original, copied = two_image_folders

    assert hashes_of_images(copied) == hashes_of_images(original)


def test_changed_image_file_changes_the_hash_of_its_client(two_image_folders):
    original, copied = two_image_folders

    last_of_six_images = copied / "dog" / "2.png"
    save_gray_image(last_of_six_images, gray=21)

    assert changed_clients(hashes_of_images(original), hashes_of_images(copied)) == ["b"]


def set_up_data_of(x):
    dataset = TensorDataset(x, torch.arange(60) % 2)
    return set_up_data(dataset, SizePartitioner([1, 2], seed=0))


@pytest.mark.parametrize("owner", ["1", "server"])
def test_changed_sample_changes_the_hash_of_its_owner(owner):
    x = torch.arange(60.0)[:, None]
    data = set_up_data_of(x)
    hashes = data.content_hashes()
    assert list(hashes) == ["server", "0", "1"]
    samples_by_owner = {"1": data.client_indices(1), "server": data.server_val_indices}

    changed_sample = samples_by_owner[owner][0]
    x[changed_sample] += 1

    hashes_after_change = set_up_data_of(x).content_hashes()
    assert changed_clients(hashes, hashes_after_change) == [owner]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_not_finite_returns_the_indices_of_samples_with_nan_or_infinity(value):
    inputs = torch.zeros(3000, 2, 4)
    first_last_and_two_neighbors = [0, 1023, 1024, 2999]
    inputs[first_last_and_two_neighbors, 1, 2] = value

    assert not_finite(TensorDataset(inputs)).tolist() == first_last_and_two_neighbors


def test_not_finite_of_a_subset_returns_positions_in_the_subset():
    inputs = torch.zeros(9, 2)
    inputs[5] = torch.nan

    assert not_finite(Subset(TensorDataset(inputs), [7, 5, 8])).tolist() == [1]


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(3, 2), torch.arange(3), torch.zeros(0, 2)],
    ids=["numbers", "whole numbers", "no samples"],
)
def test_finite_inputs_are_not_named_as_broken(inputs):
    assert len(not_finite(TensorDataset(inputs))) == 0


def make_dataset_of(value):
    return TensorDataset(torch.full((8, 2), value), torch.arange(8) % 3)


def test_test_samples_with_non_finite_inputs_are_refused():
    source = (make_dataset_of(0.0), make_dataset_of(torch.nan))

    with refused("8 samples of the test data have NaN"):
        set_up_data(source, IIDPartitioner(2))


def test_held_out_samples_with_non_finite_inputs_are_refused():
    source = make_dataset_of(torch.inf)

    with refused("4 samples of the held-out data have NaN"):
        set_up_data(source, IIDPartitioner(2), server_val=0.0, client_val=0.4)
