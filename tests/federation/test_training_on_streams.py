"""Clients that train on streams, beside a plain loop: in one process and at sites, and what their values are."""

from functools import partial
from itertools import count
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, Stream
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.sites import RemoteFederation, Site, agreement
from helpers import make_generator
from helpers.fits import trainer_for
from helpers.loops_by_hand import average_models, cross_entropy_of, federate, take_steps
from helpers.models import network, sgd
from helpers.sites import SiteTransport, data_at_sites, gather_sites

SEED = 5
ROUNDS = 2
BATCH = 8
SAMPLES = 90
X = torch.randn(SAMPLES, 6, generator=make_generator())
Y = torch.arange(SAMPLES) % 3
VAL = (X[:30] + 0.1, Y[:30])
#: Samples that each monitor trains on in a pass.
SIZES = (20, 28)
BOTH = (0, 1)
#: A monitor's first beat follows the former monitor's by so many, a round's that of the former round.
BEATS_BETWEEN_MONITORS = 40
BEATS_BETWEEN_ROUNDS = 10


def loss_of(net, batch):
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


class UsersModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(batch_norm=False)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return loss_of(self.net, batch)

    def validation_step(self, batch):
        self.log("val_loss", loss_of(self.net, batch))

    def configure_optimizers(self):
        return sgd(self.parameters())


def first_beat(monitor, round_index):
    return BEATS_BETWEEN_MONITORS * monitor + BEATS_BETWEEN_ROUNDS * round_index


class StreamThatGoesOn(IterableDataset[Any]):
    """A monitor's heart beats, which go on from round to round."""

    def __init__(self, monitor):
        self.monitor = monitor
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for beat in count(first_beat(self.monitor, self.epoch)):
            row = beat % SAMPLES
            yield X[row], Y[row]


def make_stream(monitor):
    return Stream(StreamThatGoesOn(monitor), SIZES[monitor])


def make_data():
    clients = {f"monitor {monitor}": make_stream(monitor) for monitor in BOTH}
    return FederatedDataModule(clients=clients, val=VAL, batch_size=BATCH)


def make_loop(**options):
    return FederatedLoop(seed=SEED, **options)


def train_by_hand(members=BOTH, batches_of_pass=4, steps=None):
    """The network after federated averaging; ``steps`` of two passes, or one pass."""

    def visit(model, round_index, client):
        begin = first_beat(client, round_index)
        end = begin + SIZES[client]
        rows = torch.arange(begin, end) % SAMPLES
        rows_by_batch = rows.split(BATCH)[:batches_of_pass]
        batches = [(X[batch_rows], Y[batch_rows]) for batch_rows in rows_by_batch]
        if steps is not None:
            two_passes = [*batches, *batches]
            batches = two_passes[:steps]
        optimizer = sgd(model.parameters())
        take_steps(optimizer, cross_entropy_of(model), batches)

    def combine(server, models):
        sizes = [SIZES[client] for client in models]
        return average_models([*models.values()], sizes)

    return federate(network(batch_norm=False), [members] * ROUNDS, visit, combine)


def assert_trained_as(module, expected):
    trained = parameters_to_vector(module.parameters())
    torch.testing.assert_close(
        trained, parameters_to_vector(expected.parameters()), rtol=0, atol=1e-6
    )
    initial = parameters_to_vector(UsersModule().parameters())
    assert (trained - initial).abs().max() > 1e-2


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("batches_of_pass", "steps"),
    [
        (4, None),
        (2, None),
        (4, 5),
    ],
    ids=["", "2 batches", "5 steps"],
)
def test_streams_train_as_a_loop_by_hand(tmp_path, batches_of_pass, steps):
    work = 1 if steps is None else f"{steps} steps"
    module = UsersModule()
    data = make_data()

    loop = make_loop(local_epochs=work)
    trainer = trainer_for(loop, tmp_path, ROUNDS, limit_train_batches=batches_of_pass)
    trainer.fit(module, data)

    assert data.num_samples.tolist() == list(SIZES)
    assert_trained_as(module, train_by_hand(BOTH, batches_of_pass, steps))


@torch.no_grad()
def score_by_hand(net, performance):
    if performance == "val_loss":
        return -float(loss_of(net, VAL))
    inputs, labels = VAL
    return float((net(inputs).argmax(1) == labels).float().mean())


# Classes that the data do not tell are those of the validation samples.
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"performance": "val_loss", "mode": "min"}, {}])
def test_value_of_a_stream_is_that_of_all_that_it_trains_on(tmp_path, options):
    """Shapley values of two players: the mean of what one adds to nobody and to the other one."""
    performance = options.get("performance", "accuracy")
    shadow = ShadowShapley(coalitions="all", **options)
    loop = make_loop(metrics={"value": shadow})

    trainer_for(loop, tmp_path, ROUNDS).fit(UsersModule(), make_data())

    scores = {(): score_by_hand(network(batch_norm=False), performance)}
    for members in ((0,), (1,), BOTH):
        scores[members] = score_by_hand(train_by_hand(members), performance)
    gain = scores[BOTH] - scores[()]
    difference = scores[0,] - scores[1,]
    expected = [(gain + difference) / 2, (gain - difference) / 2]
    assert abs(difference) > 1e-3
    assert loop.contributions["value"].tolist() == pytest.approx(expected, abs=1e-6)


class StreamOfSite(L.LightningDataModule):
    def __init__(self, monitor):
        super().__init__()
        self.monitor = monitor

    def train_dataloader(self):
        return DataLoader(make_stream(self.monitor), BATCH)


class ServersSamples(L.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(TensorDataset(*VAL), BATCH)


@pytest.mark.slow
def test_sites_train_on_their_own_streams(tmp_path):
    sites = {}
    for monitor in BOTH:
        make_site_data = partial(StreamOfSite, monitor)
        folder = tmp_path / f"site {monitor}"
        sites[100 + monitor] = Site(
            UsersModule, make_site_data, make_loop, folder, upload_seed=SEED
        )
    names = ["Boston", "Lyon"]
    facts = agreement(UsersModule(), make_loop())
    directory = gather_sites(tmp_path, SiteTransport(sites), facts, names)
    # The server is not told the classes, which its own samples have.
    data = data_at_sites(directory, names, server_data=ServersSamples())
    engine = partial(RemoteFederation, directory)
    loop = make_loop(engine=engine, metrics={"value": CumulativeShapley()})
    module = UsersModule()

    trainer_for(loop, tmp_path, ROUNDS).fit(module, data)

    expected = train_by_hand()
    assert_trained_as(module, expected)
    untrained = score_by_hand(network(batch_norm=False), "accuracy")
    gain = score_by_hand(expected, "accuracy") - untrained
    assert loop.contributions["value"].sum().item() == pytest.approx(gain)
