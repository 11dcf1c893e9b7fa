"""Several training loaders of a data module, and streams: whose samples they are, and what is refused."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flsv import FederatedLoop
from flsv.data import (
    ClosedSetLabelNoise,
    FederatedDataModule,
    GroupPartitioner,
    IIDPartitioner,
    OneClient,
    Splits,
    Stream,
)
from flsv.metrics import InRunShapley
from flsv.sampling import PowerOfChoice
from flsv.training.algorithms import InRunValues
from flsv.utilities.errors import ConfigurationError
from helpers.data import set_up_data
from helpers.fits import fit
from helpers.models import Plainest

SIZE = 120
NUMBERS = torch.arange(SIZE)
X = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
Y = NUMBERS % 3
VAL = (X, Y)
LABELED = TensorDataset(X, Y)
NUMBERED = TensorDataset(NUMBERS)
#: As many as no other data set here, so that they are samples of their own.
UNLABELED_NUMBERS = range(500, 577)
UNLABELED = TensorDataset(torch.tensor(UNLABELED_NUMBERS))


def make_project(loaders: Any) -> L.LightningDataModule:
    module = L.LightningDataModule()
    module.train_dataloader = lambda: loaders
    return module


def make_loader(dataset: Dataset, batch_size: int = 8, sampler: Any = None) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size,
        shuffle=sampler is None,
        sampler=sampler,
    )


def numbers_read(data: FederatedDataModule, client: int) -> list[int]:
    """What the client's loader of unlabeled samples reads in a local epoch."""
    numbers = []
    for batch in data.client_loader(client):
        if batch["unlabeled"] is not None:
            (column,) = batch["unlabeled"]
            numbers += column.tolist()
    return sorted(numbers)


def test_samples_of_a_further_loader_are_dealt_once_each():
    loaders = {"labeled": make_loader(LABELED), "unlabeled": make_loader(UNLABELED)}
    combined = CombinedLoader(loaders, "max_size")

    data = set_up_data(make_project(combined), IIDPartitioner(3))

    dealt = []
    for client in range(3):
        assert len(data.client_loader(client)) == 5  # 36 labeled samples, 8 at a time
        dealt += numbers_read(data, client)
    assert sorted(dealt) == list(UNLABELED_NUMBERS)
    assert data.num_samples.tolist() == [36, 36, 36]  # of the first loader


def test_batches_of_a_list_of_one_loader_are_lists_as_in_lightning():
    data = set_up_data(make_project([make_loader(LABELED)]), IIDPartitioner(3))
    batch = next(iter(data.client_loader(0)))
    assert len(batch) == 1
    x, _ = batch[0]
    assert x.shape == (8, 6)


HALF = list(range(0, SIZE, 2))
OTHER_HALF = list(range(1, SIZE, 2))


def make_two_views():
    """Two loaders of all samples, one of the numbers only."""
    loaders = {"labeled": make_loader(LABELED), "unlabeled": make_loader(NUMBERED)}
    return loaders, range(SIZE), range(SIZE)


def make_half_labeled():
    loaders = {
        "labeled": make_loader(Subset(NUMBERED, HALF)),
        "unlabeled": make_loader(NUMBERED),
    }
    return loaders, HALF, range(SIZE)


def make_samplers():
    loaders = {
        "labeled": make_loader(NUMBERED, sampler=SubsetRandomSampler(HALF)),
        "unlabeled": make_loader(NUMBERED, sampler=SubsetRandomSampler(OTHER_HALF)),
    }
    return loaders, HALF, OTHER_HALF


@pytest.mark.parametrize("make", [make_two_views, make_half_labeled, make_samplers])
def test_what_is_held_out_or_another_clients_is_in_no_loader(make):
    loaders, labeled_rows, unlabeled_rows = make()
    splits = Splits(server_val=0.2, client_test=0.2)

    data = set_up_data(
        make_project(loaders),
        IIDPartitioner(3),
        labels=False,
        splits=splits,
    )

    labeled_set = loaders["labeled"].dataset
    if isinstance(labeled_set, Subset):
        row_of_index = labeled_set.indices
    else:
        row_of_index = range(SIZE)
    owners = {}
    for client in range(3):
        for index in data.client_indices(client).tolist():
            owners[row_of_index[index]] = client
    held_out = set(labeled_rows) - set(owners)
    # A fifth by the server, and of the others a fifth by the clients, is more than a third but for rounding.
    assert len(held_out) > 0.3 * len(labeled_rows)

    numbers_of_all = []
    for client in range(3):
        # The longer loader is read once, the shorter one again.
        numbers = set(numbers_read(data, client))
        labeled_numbers = numbers & set(labeled_rows)
        assert {owners[number] for number in labeled_numbers} <= {client}
        numbers_of_all += numbers
    expected = set(unlabeled_rows) - held_out
    assert sorted(numbers_of_all) == sorted(expected)


class Hospitals(TensorDataset):
    def __init__(self, *tensors: Tensor, groups: list[str]) -> None:
        super().__init__(*tensors)
        self.groups = groups


def test_groups_have_their_own_samples_in_each_loader():
    labeled = Hospitals(*LABELED.tensors, groups=["Boston", "Lyon"] * 60)
    numbers_of_lyon = UNLABELED_NUMBERS[:50]
    numbers_of_boston = UNLABELED_NUMBERS[50:70]
    groups = ["Lyon"] * 50 + ["Boston"] * 20 + ["elsewhere"] * 7
    unlabeled = Hospitals(*UNLABELED.tensors, groups=groups)
    loaders = {"labeled": make_loader(labeled), "unlabeled": make_loader(unlabeled)}

    with pytest.warns(UserWarning, match="7 samples of training loader 2 are in no client's group"):
        data = set_up_data(make_project(loaders), GroupPartitioner())

    assert data.client_names == ("Boston", "Lyon")
    assert set(numbers_read(data, 0)) == set(numbers_of_boston)
    assert set(numbers_read(data, 1)) == set(numbers_of_lyon)

    loaders["unlabeled"] = make_loader(UNLABELED)
    message = "loader 2: each client is a group, and TensorDataset does not say"
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(make_project(loaders), GroupPartitioner())


def test_shorter_loader_is_shuffled_anew_and_begins_as_it_does_alone():
    # 36 samples of a client are two batches of 32 and 4, and five of 8 and fewer.
    loader_of_two_batches = make_loader(LABELED, batch_size=32)
    loader_of_five_batches = make_loader(NUMBERED, batch_size=8)
    combined = set_up_data(
        make_project([loader_of_two_batches, loader_of_five_batches]),
        IIDPartitioner(3),
    )
    alone = set_up_data(make_project(loader_of_two_batches), IIDPartitioner(3))

    expected = []
    for x, _ in alone.client_loader(0, generator=torch.Generator().manual_seed(1)):
        expected.append(x)
    inputs = []
    for pair, _ in combined.client_loader(0, generator=torch.Generator().manual_seed(1)):
        inputs.append(pair[0])

    assert len(expected) == 2
    assert len(inputs) == 5
    assert torch.equal(inputs[0], expected[0])
    assert torch.equal(inputs[1], expected[1])
    first_pass = torch.cat(expected)
    second_pass = torch.cat(inputs[2:4])
    assert not torch.equal(second_pass, first_pass)
    assert torch.equal(second_pass.sort(0).values, first_pass.sort(0).values)


def test_samples_of_the_validation_loader_are_in_no_training_loader():
    first_rows = Subset(NUMBERED, range(90))
    val_rows = Subset(NUMBERED, range(100, SIZE))
    project = make_project({"labeled": make_loader(first_rows), "unlabeled": make_loader(NUMBERED)})
    project.val_dataloader = lambda: DataLoader(val_rows, 8)

    data = set_up_data(project, IIDPartitioner(2), labels=False, splits=Splits(server_val=0.0))

    numbers = numbers_read(data, 0) + numbers_read(data, 1)
    assert set(numbers) == set(range(100))


def test_record_of_a_run_tells_the_further_loaders_batches_and_no_addresses():
    for batch_size in (8, 4):
        further_loader = make_loader(UNLABELED, batch_size)
        data = set_up_data(make_project([make_loader(LABELED), further_loader]))
        assert data.describe()["loaders"] == f"2, max_size_cycle, further batches of {batch_size}"


class Tagged(TensorDataset):
    """Samples with an attribute that names each one's patient."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.patient = [number // 4 for number in range(len(self))]


WEIGHTED = WeightedRandomSampler([1.0] * 77, 77)
OTHER_HOSPITALS = Hospitals(X, Y, groups=["Lyon", "Boston"] * 60)


@pytest.mark.parametrize(
    ("first_loader", "second_loader", "options", "message"),
    [
        pytest.param(
            make_loader(LABELED),
            make_loader(ConcatDataset([LABELED, UNLABELED])),
            {},
            "share samples within a ConcatDataset",
            id="joined",
        ),
        pytest.param(
            make_loader(LABELED),
            make_loader(UNLABELED, sampler=WEIGHTED),
            {},
            "loader 2 draws samples by weights",
            id="weights",
        ),
        pytest.param(
            make_loader(LABELED),
            make_loader(UNLABELED),
            {"corruptions": [ClosedSetLabelNoise(rate=0.5)]},
            "corruptions would change the samples of the first",
            id="corruptions",
        ),
        pytest.param(
            make_loader(Tagged(X, Y)),
            make_loader(UNLABELED),
            {"splits": Splits(server_val=0.2, together="patient")},
            "A column chooses what is held out or stays together",
            id="patients",
        ),
        pytest.param(
            make_loader(Hospitals(X, Y, groups=["Boston", "Lyon"] * 60)),
            make_loader(OTHER_HOSPITALS),
            {"partitioner": GroupPartitioner()},
            "as many samples as the first one, .* and other groups",
            id="other groups",
        ),
    ],
)
def test_loaders_whose_samples_may_be_held_out_or_anothers_are_refused(
    first_loader, second_loader, options, message
):
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(make_project([first_loader, second_loader]), **options)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(6), torch.tensor(1)


BOSTONS_LENGTH = 40
LYONS_LENGTH = 20


class Sized(Endless):
    def __len__(self) -> int:
        return LYONS_LENGTH


STREAMS = {"Boston": Stream(Endless(), BOSTONS_LENGTH), "Lyon": Sized()}


def batch_sizes(data: FederatedDataModule, client: int) -> list[int]:
    return [len(x) for x, _ in data.client_loader(client)]


def test_streams_are_read_as_far_as_they_say():
    data = set_up_data(clients=STREAMS, val=VAL, batch_size=16)
    assert data.num_samples.tolist() == [BOSTONS_LENGTH, LYONS_LENGTH]
    assert batch_sizes(data, 0) == [16, 16, 8]  # of 40
    assert batch_sizes(data, 1) == [16, 4]  # of 20
    with pytest.raises(ConfigurationError, match="streams of several clients .* FederatedLoop"):
        data.train_dataloader()


def test_stream_of_a_site_is_read_as_far_as_it_says():
    module = make_project(DataLoader(Sized(), batch_size=8))

    site = set_up_data(module, OneClient(), server_val=0.0)

    assert batch_sizes(site, 0) == [8, 8, 4]  # of 20


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            Endless(),
            {},
            r"stream of unknown length.*flsv.data.Stream\(dataset, samples=640\)",
        ),
        (
            Sized(),
            {},
            r"cannot be divided among clients.*clients=\{'Boston': stream, ...\}",
        ),
        (
            Sized(),
            {"partitioner": OneClient()},
            r"No sample of a stream.*Splits\(server_val=0\)",
        ),
        (
            make_project([]),
            {},
            "training loader is a list whose samples cannot be divided",
        ),
        (
            make_project([make_loader(LABELED), DataLoader(Sized(), 2)]),
            {},
            "a stream among several training loaders",
        ),
        (
            make_project(CombinedLoader([make_loader(LABELED)], "sequential")),
            {},
            "on which Lightning does not train",
        ),
        (
            make_project([make_loader(LABELED), make_loader(Subset(UNLABELED, [0, 1]))]),
            {},
            "Client 2 has 0 samples of training loader 2, not one batch of 8",
        ),
    ],
)
def test_loaders_that_cannot_be_divided_are_refused(source, options, message):
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(source, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_test": 2}, r"No sample of a stream.*Splits\(client_test=0\)"),
        ({"preload": True}, "cannot be read by number"),
        ({"splits": Splits(server_val=0.0, max_samples=14)}, "leave max_samples out"),
        ({"labels": [0] * 60}, "The labels of a stream are in its samples"),
    ],
)
def test_samples_of_a_stream_are_neither_held_out_nor_read_into_memory(options, message):
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(clients=STREAMS, val=VAL, **options)


def test_stream_that_ends_early_or_cannot_begin_anew_is_told():
    with pytest.raises(RuntimeError, match="has ended after 5 of 8 samples"):
        list(Stream(range(5), samples=8))
    with pytest.raises(ConfigurationError, match="a list_iterator is read only once"):
        Stream(iter([1, 2, 3]), samples=2)


def test_stream_is_not_read_by_several_workers():
    module = make_project(DataLoader(Sized(), 8, num_workers=2))
    site = set_up_data(module, OneClient(), server_val=0.0)
    with pytest.raises(ConfigurationError, match="Set num_workers to 1 or 0"):
        site.client_loader(0)


BY_SAMPLE = {
    "metrics": {"in_run": InRunShapley(loss="val_loss")},
    "client_algorithm": InRunValues(),
}
TWO_LOADERS = make_project([make_loader(LABELED), make_loader(UNLABELED)])


@pytest.mark.parametrize(
    ("data", "arguments", "kind"),
    [
        (FederatedDataModule(TWO_LOADERS), BY_SAMPLE, "collection of training loaders"),
        (FederatedDataModule(clients=STREAMS, val=VAL), BY_SAMPLE, "a client's stream"),
        (
            FederatedDataModule(clients=STREAMS, val=VAL),
            {"sampler": PowerOfChoice(1, 2)},
            "a client's stream",
        ),
    ],
)
def test_what_reads_single_samples_is_refused_before_the_first_round(
    data, arguments, kind, tmp_path
):
    message = f"one by one, which cannot be done with.*{kind}"
    with pytest.raises(ConfigurationError, match=message):
        fit(FederatedLoop(**arguments), tmp_path, Plainest(), data)
