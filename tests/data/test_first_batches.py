"""The first batch of each client has the labels and the number of samples that flsv holds."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from flsv.data import FederatedDataModule, GroupPartitioner, IIDPartitioner
from flsv.federation import FederatedLoop
from helpers import refused, warns
from helpers.data import DataModuleOfLoader, Items, set_up_data
from helpers.fits import fit
from helpers.models import Plain


class FourClasses(Dataset):
    def __init__(self, length=80):
        self.targets = [index % 4 for index in range(length)]

    def __len__(self):
        return len(self.targets)

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index):
        x = torch.full((4,), float(index))
        return x, self.targets[index]


def collate_with_two_labels(samples):
    x, y = default_collate(samples)
    return x, y // 2


class ReadsOtherLabelsThanItStores(FourClasses):
    def __init__(self, labels_by_stored):
        super().__init__()
        self.labels_by_stored = labels_by_stored

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, self.labels_by_stored[y]


def make_source(dataset, collate_fn, **options):
    """A data module whose training loader has a ``collate_fn``."""
    loader = DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=collate_fn, **options)
    return DataModuleOfLoader(loader)


SOURCES_WITH_OTHER_LABELS = {
    "collated": lambda: make_source(FourClasses(), collate_with_two_labels),
    "other order": lambda: ReadsOtherLabelsThanItStores([3, 2, 1, 0]),
    "three of four": lambda: ReadsOtherLabelsThanItStores([0, 1, 2, 0]),
}


@pytest.mark.parametrize("kind", SOURCES_WITH_OTHER_LABELS)
def test_stored_labels_that_samples_contradict_are_refused(kind):
    dataset = SOURCES_WITH_OTHER_LABELS[kind]()
    with refused("client 0: flsv has read the labels .* in a batch .* have .*`targets`"):
        set_up_data(dataset, IIDPartitioner(3))


@pytest.mark.parametrize("kind", SOURCES_WITH_OTHER_LABELS)
def test_labels_that_are_passed_may_differ_from_those_of_samples(kind):
    two_labels = [int(label >= 2) for label in FourClasses().targets]

    data = set_up_data(SOURCES_WITH_OTHER_LABELS[kind](), IIDPartitioner(3), labels=two_labels)

    assert data.num_classes == 2


def collate_none_of_client_one(samples):
    """An input is its sample's index, and client 1 has the samples from 40 on."""
    samples_of_client_zero = [(x, y) for x, y in samples if x[0] < 40]
    if not samples_of_client_zero:
        return None
    return default_collate(samples_of_client_zero)


def collate_without_class_three(samples):
    without_three = [(x, y) for x, y in samples if y != 3]
    return default_collate(without_three or samples[:1])


@pytest.mark.parametrize(
    ("collate_fn", "batch"),
    [
        (collate_none_of_client_one, "client 1: collate_fn makes a batch of 0 rows"),
        (collate_without_class_three, "client 0: collate_fn makes a batch of 12 rows"),
    ],
)
def test_samples_that_a_collate_function_leaves_out_are_refused(collate_fn, batch):
    source = make_source(FourClasses(), collate_fn)
    clients_of_samples = [0] * 40 + [1] * 40

    with refused(f"{batch} of 16 samples"):
        set_up_data(source, GroupPartitioner(), groups=clients_of_samples, server_val=0.0)


def first_input(sample):
    x, _ = sample
    return float(x[0])


def collate_backwards(samples):
    backwards = sorted(samples, key=first_input, reverse=True)
    return default_collate(backwards)


def collate_with_lengths(samples):
    x, y = default_collate(samples)
    lengths = torch.full((len(y),), 4)
    return x, y, lengths


def mix_with_flipped(rows):
    """Mix each row with another one, as mixup does it."""
    return rows.lerp(rows.flip(0), 0.3)


def collate_mixed(samples):
    x, y = default_collate(samples)
    one_hot_labels = torch.eye(4)[y]
    return mix_with_flipped(x), mix_with_flipped(one_hot_labels)


def collate_two_views(samples):
    x, y = default_collate(samples)
    return x.repeat(2, 1), y.repeat(2)


def collate_labels_as_floats(samples):
    x, y = default_collate(samples)
    return x, y[:, None].float()


@pytest.mark.parametrize(
    "collate_fn",
    [
        collate_backwards,
        collate_with_lengths,
        collate_mixed,
        collate_two_views,
        collate_labels_as_floats,
    ],
)
def test_batches_in_which_a_collate_function_keeps_all_labels_are_used(collate_fn):
    source = make_source(FourClasses(), collate_fn)
    data = set_up_data(source, IIDPartitioner(2), server_val=0.0)
    assert data.class_counts.sum().item() == 80


def test_check_of_first_batches_reads_five_samples_of_each_client():
    samples = FourClasses(4000)
    dataset = Items(samples, targets=samples.targets)
    generator_state = torch.get_rng_state()
    num_clients = 100

    set_up_data(dataset, IIDPartitioner(num_clients), server_val=0.0)

    assert dataset.reads == 5 * num_clients
    assert torch.equal(torch.get_rng_state(), generator_state)


class AddsNoiseWhenRead(FourClasses):
    """Adds noise to a sample whenever it is read."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(4), y


def add_noise(samples):
    x, y = default_collate(samples)
    return x + torch.rand(1), y


RANDOM_SOURCES = {
    "transform": lambda: make_source(AddsNoiseWhenRead(), default_collate),
    "collate_fn": lambda: make_source(FourClasses(), add_noise),
    "worker": lambda: make_source(AddsNoiseWhenRead(), None, num_workers=1),
}


@pytest.mark.parametrize("kind", RANDOM_SOURCES)
@pytest.mark.parametrize(("server_val", "client_test"), [(0.2, 0.0), (0.0, 0.2)])
def test_random_changes_of_held_out_samples_have_a_warning(kind, server_val, client_test):
    source = RANDOM_SOURCES[kind]()

    with warns("change at random"):
        set_up_data(source, IIDPartitioner(2), server_val=server_val, client_test=client_test)


@pytest.mark.parametrize("collate_fn", [default_collate, collate_backwards, collate_with_lengths])
def test_held_out_samples_that_do_not_change_have_no_warning(collate_fn, recwarn):
    set_up_data(make_source(FourClasses(), collate_fn), IIDPartitioner(2))

    assert all("at random" not in str(warning.message) for warning in recwarn)


def test_random_changes_of_training_samples_alone_have_no_warning(recwarn):
    set_up_data(RANDOM_SOURCES["transform"](), IIDPartitioner(2), server_val=0.0)

    assert all("at random" not in str(warning.message) for warning in recwarn)


class GrowsIfToldTo(FourClasses):
    """Adds a sample whenever one is read, from the moment on when it is told to."""

    grows = False

    def __getitem__(self, index):
        if self.grows:
            self.targets.append(index % 4)
        return super().__getitem__(index)


class TellsDataToGrow(Plain):
    """Tells a data set to grow when training begins."""

    def __init__(self, dataset):
        super().__init__(nn.Linear(4, 4))
        self.source = SimpleNamespace(dataset=dataset)

    def on_train_start(self):
        self.source.dataset.grows = True


def make_partitioned_data(dataset):
    return FederatedDataModule(dataset, IIDPartitioner(2))


def make_data_by_client(dataset):
    return FederatedDataModule(clients={"A": dataset, "B": FourClasses()})


@pytest.mark.parametrize(
    ("make_data", "initial_length"), [(make_partitioned_data, 80), (make_data_by_client, 80 + 80)]
)
def test_data_that_grow_during_a_run_have_one_warning(make_data, initial_length, tmp_path):
    dataset = GrowsIfToldTo()
    data = make_data(dataset)

    with warns(f"has grown from {initial_length} to .* are not used") as records:
        fit(FederatedLoop(), tmp_path, TellsDataToGrow(dataset), data, rounds=3)

    warnings_of_growth = [record for record in records if "has grown" in str(record.message)]
    assert len(warnings_of_growth) == 1


class FailsUnlessOpened(FourClasses):
    """Has to be opened in each process before it is read."""

    is_open = False

    def open(self):
        self.is_open = True

    def __getitem__(self, index):
        assert self.is_open
        return super().__getitem__(index)


def open_in_worker(worker):
    torch.utils.data.get_worker_info().dataset.open()


def test_workers_call_the_users_worker_init_fn():
    source = make_source(
        FailsUnlessOpened(), collate_fn=None, num_workers=1, worker_init_fn=open_in_worker
    )
    data = set_up_data(source, IIDPartitioner(2), labels=FourClasses().targets, client_val=0.2)

    for split in ("train", "val"):
        rows = []
        for x, _ in data.client_loader(1, split):
            rows += x[:, 0].tolist()  # a sample's features are its row
        assert sorted(rows) == data.client_indices(1, split).tolist()

    # The server's samples are read in a worker, too.
    assert data.validation()["rows"] == len(data.server_val_indices)
