"""Streams: how far they are read, and what is refused."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from flsv import FederatedLoop
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import FederatedDataModule, OneClient, Splits, Stream
from flsv.sampling import PowerOfChoice
from helpers import make_generator, refused
from helpers.data import DataModuleOfLoader, set_up_data
from helpers.fits import fit
from helpers.models import Plainest

VAL = (torch.randn(120, 6, generator=make_generator()), torch.arange(120) % 3)


class EndlessStream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(6), torch.tensor(1)


BOSTONS_LENGTH = 40
LYONS_LENGTH = 20


class StreamWithLength(EndlessStream):
    def __len__(self):
        return LYONS_LENGTH


STREAMS = {"Boston": Stream(EndlessStream(), BOSTONS_LENGTH), "Lyon": StreamWithLength()}


def batch_sizes(data, client):
    return [len(x) for x, _ in data.client_loader(client)]


def test_streams_of_clients_are_read_up_to_their_lengths():
    data = set_up_data(clients=STREAMS, val=VAL, batch_size=16)

    assert data.num_samples.tolist() == [BOSTONS_LENGTH, LYONS_LENGTH]
    assert batch_sizes(data, 0) == [16, 16, 8]  # of 40
    assert batch_sizes(data, 1) == [16, 4]  # of 20
    with refused("streams of several clients .* FederatedLoop"):
        data.train_dataloader()


def test_stream_of_a_site_is_read_up_to_its_length():
    module = DataModuleOfLoader(DataLoader(StreamWithLength(), batch_size=8))

    site = set_up_data(module, OneClient(), server_val=0.0)

    assert batch_sizes(site, 0) == [8, 8, 4]  # of 20


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (EndlessStream(), {}, r"without a length.*flsv.data.Stream\(dataset, samples=640\)"),
        (StreamWithLength(), {}, r"cannot be divided .*clients=\{'Boston': stream, ...\}"),
        (
            StreamWithLength(),
            {"partitioner": OneClient()},
            r"Samples of a stream.*Splits\(server_val=0\)",
        ),
    ],
)
def test_streams_that_cannot_be_divided_are_refused(source, options, message):
    with refused(message):
        set_up_data(source, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_test": 2}, r"Samples of a stream.*Splits\(client_test=0\)"),
        ({"preload": True}, "cannot be read by their indices"),
        (
            {"splits": Splits(server_val=0.0, max_samples=14)},
            "max_samples=.... cannot shorten a stream",
        ),
        ({"labels": [0] * 60}, "The labels of a stream are read with its samples"),
    ],
)
def test_samples_of_a_stream_are_neither_held_out_nor_read_into_memory(options, message):
    with refused(message):
        set_up_data(clients=STREAMS, val=VAL, **options)


def test_stream_that_ends_early_raises():
    with pytest.raises(RuntimeError, match="has ended after 5 samples, but .*samples=8"):
        list(Stream(range(5), samples=8))


def test_stream_that_can_be_read_only_once_is_refused():
    with refused("a list_iterator can be read only once"):
        Stream(iter([1, 2, 3]), samples=2)


def test_stream_is_not_read_by_several_workers():
    module = DataModuleOfLoader(DataLoader(StreamWithLength(), batch_size=8, num_workers=2))
    site = set_up_data(module, OneClient(), server_val=0.0)

    with refused("Set num_workers to 1 or 0"):
        site.client_loader(0)


VALUES_BY_SAMPLE = {
    "metrics": {"in_run": InRunShapley(loss="val_loss")},
    "client_algorithm": InRunValues(),
}
COHORTS_BY_LOSS = {"sampler": PowerOfChoice(cohort_size=1, candidates=2)}


@pytest.mark.parametrize("loop_options", [VALUES_BY_SAMPLE, COHORTS_BY_LOSS])
def test_parts_that_read_samples_by_index_are_refused_with_streams(loop_options, tmp_path):
    data = FederatedDataModule(clients=STREAMS, val=VAL)

    with refused("by index, but a client's data are a stream"):
        fit(FederatedLoop(**loop_options), tmp_path, Plainest(), data)
