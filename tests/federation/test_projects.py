"""Projects as people have them, beside plain loops: what is held out, which loaders there are, what is logged.

A loop by hand reads the samples of the project's own tensors. Of flsv it has the seeds, and what a client holds where
that is drawn at random.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, GroupPartitioner, HeldOut, Splits, Stream
from flsv.engines.remote import Directory, RemoteData, RemoteFederation, Site, agreement
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.utilities.seeding import generator_for
from helpers import make_generator
from helpers.fits import trainer_for
from helpers.loops_by_hand import federate
from helpers.models import network, sgd
from helpers.sites import SiteTransport

SEED = 5
ROUNDS = 2
BATCH = 8
SAMPLES = 90
GENERATOR = make_generator()
X = torch.randn(SAMPLES, 6, generator=GENERATOR)
Y = torch.arange(SAMPLES) % 3
VAL = (X[:30] + 0.1, Y[:30])
DATES = [f"{2020 + row % 5}-0{1 + row % 9}-01" for row in range(SAMPLES)]
WARDS = ["Boston", "Lyon"] * (SAMPLES // 2)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


class Project(L.LightningModule):
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


class Samples(TensorDataset):
    def __init__(self, *tensors: Tensor, **columns: Any):
        super().__init__(*tensors)
        vars(self).update(columns)


#: A monitor's first beat follows the former monitor's by so many, a round's that of the former round.
BEATS_BETWEEN_MONITORS = 40
BEATS_BETWEEN_ROUNDS = 10


def first_beat(monitor: int, round_index: int) -> int:
    return BEATS_BETWEEN_MONITORS * monitor + BEATS_BETWEEN_ROUNDS * round_index


class Beats(IterableDataset[Any]):
    """A monitor's heart beats, which go on from round to round."""

    def __init__(self, monitor: int):
        self.monitor = monitor
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for beat in count(first_beat(self.monitor, self.epoch)):
            row = beat % SAMPLES
            yield X[row], Y[row]


MakeBatches = Callable[[int, int], list[Any]]


@dataclass(frozen=True)
class Case:
    """The data, the options of loop and Trainer, and by hand: a client's batches in a round, and numbers of samples."""

    data: FederatedDataModule
    make_batches: MakeBatches
    sizes: list[int]
    trainer_options: dict[str, Any] = field(default_factory=dict)
    loop_options: dict[str, Any] = field(default_factory=dict)


def shuffle_by_hand(
    rows: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, ...]:
    order = torch.randperm(len(rows), generator=generator)
    return rows[order].split(BATCH)


def shuffle_labeled(rows_of_clients: list[Tensor]) -> MakeBatches:
    def make_batches(round_index: int, client: int) -> list[Any]:
        rows_of_client = rows_of_clients[client]
        generator = generator_for(SEED, "shuffle", round_index, client, 0)
        batches = []
        for rows in shuffle_by_hand(rows_of_client, generator):
            batches.append((X[rows], Y[rows]))
        return batches

    return make_batches


def make_wards_case(is_held_out: list[bool], splits: Splits, **columns: Any) -> Case:
    """Two wards' samples without those that are held out."""
    rows_of_wards = []
    for ward in ("Boston", "Lyon"):
        rows_in_training = []
        for row in range(SAMPLES):
            if WARDS[row] == ward and not is_held_out[row]:
                rows_in_training.append(row)
        rows_of_wards.append(torch.tensor(rows_in_training))

    source = Samples(X, Y, groups=WARDS, **columns)
    data = FederatedDataModule(
        source,
        GroupPartitioner(),
        batch_size=BATCH,
        splits=splits,
    )
    sizes = [len(rows) for rows in rows_of_wards]
    return Case(data, shuffle_labeled(rows_of_wards), sizes)


def hold_out_since_a_date(folder: Path) -> Case:
    recent = HeldOut("admitted", since="2024-01-01")
    splits = Splits(server_val=recent)
    is_held_out = [date >= "2024" for date in DATES]
    return make_wards_case(is_held_out, splits, admitted=DATES)


def hold_out_ids(folder: Path) -> Case:
    patients = [f"p{row % 30}" for row in range(SAMPLES)]
    file = folder / "test.txt"
    file.write_text("p3\np17\np22\n")
    chosen = HeldOut("patient", file=str(file))
    splits = Splits(server_val=chosen, together="patient")
    is_held_out = [patient in ("p3", "p17", "p22") for patient in patients]
    return make_wards_case(is_held_out, splits, patient=patients)


STREAM_SIZES = (20, 28)


def train_on_streams(
    batches_of_pass: int = 4,
    steps: int | None = None,
) -> Case:
    clients = {}
    for monitor, size in enumerate(STREAM_SIZES):
        clients[f"monitor {monitor}"] = Stream(Beats(monitor), size)
    data = FederatedDataModule(clients=clients, val=VAL, batch_size=BATCH)

    def make_batches(round_index: int, client: int) -> list[Any]:
        begin = first_beat(client, round_index)
        beats = torch.arange(begin, begin + STREAM_SIZES[client])
        rows = beats % SAMPLES
        batches = []
        for rows_of_batch in rows.split(BATCH)[:batches_of_pass]:
            batches.append((X[rows_of_batch], Y[rows_of_batch]))
        if steps is None:
            return batches
        two_passes = [*batches, *batches]
        return two_passes[:steps]

    loop_options = {}
    if steps is not None:
        loop_options["local_epochs"] = f"{steps} steps"
    return Case(
        data,
        make_batches,
        sizes=list(STREAM_SIZES),
        trainer_options={"limit_train_batches": batches_of_pass},
        loop_options=loop_options,
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "a date decides": hold_out_since_a_date,
    "a list of ids is held out": hold_out_ids,
    "streams": lambda folder: train_on_streams(),
    "streams of 2 batches": lambda folder: train_on_streams(batches_of_pass=2),
    "streams of 5 steps": lambda folder: train_on_streams(steps=5),
}
BOTH = (0, 1)


def train_by_hand(case: Case, members: tuple[int, ...] = BOTH) -> Tensor:
    """The parameters ``[P]`` after federated averaging."""
    sizes = [case.sizes[client] for client in members]
    weights = (torch.tensor(sizes).double() / sum(sizes)).float()

    def visit(
        model: nn.Module,
        round_index: int,
        client: int,
    ) -> None:
        optimizer = sgd(model.parameters())
        for batch in case.make_batches(round_index, client):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()

    def combine(
        server: nn.Module,
        models: dict[int, nn.Module],
    ) -> nn.Module:
        # The weights sum to 1 but for rounding.
        mean = weights @ torch.stack([read_parameters(model) for model in models.values()])
        vector = mean + (1 - weights.sum()) * read_parameters(server)
        model = models[members[0]]
        vector_to_parameters(vector, model.parameters())
        return model

    server = federate(
        network(batch_norm=False),
        [members] * ROUNDS,
        visit,
        combine,
    )
    return read_parameters(server)


def read_parameters(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


class ServersSamples(L.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(TensorDataset(*VAL), BATCH)


def make_loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(seed=SEED, reporting=Reporting(table=False), **options)


@pytest.mark.parametrize("name", CASES)
def test_project_trains_as_its_loop_by_hand(name, tmp_path):
    case = CASES[name](tmp_path)
    module = Project()
    initial = read_parameters(module)
    loop = make_loop(**case.loop_options)
    trainer = trainer_for(loop, tmp_path, ROUNDS, **case.trainer_options)
    trainer.fit(module, case.data)

    assert case.data.num_samples.tolist() == case.sizes
    trained = read_parameters(module)
    assert not torch.equal(trained, initial)
    expected = train_by_hand(case)
    assert torch.equal(trained, expected)


@torch.no_grad()
def score_by_hand(vector: Tensor, performance: str) -> float:
    net = network(batch_norm=False)
    vector_to_parameters(vector, net.parameters())
    if performance == "val_loss":
        return -float(loss_of(net, VAL))
    inputs, labels = VAL
    return float((net(inputs).argmax(1) == labels).float().mean())


def values_by_hand(case: Case, performance: str) -> list[float]:
    """Shapley values of two players: the mean of what one adds to nobody and to the other one."""
    untrained = read_parameters(Project())
    scores = {(): score_by_hand(untrained, performance)}
    for members in ((0,), (1,), BOTH):
        trained = train_by_hand(case, members)
        scores[members] = score_by_hand(trained, performance)

    value_of_boston = (scores[0,] - scores[()] + scores[BOTH] - scores[1,]) / 2
    value_of_lyon = (scores[1,] - scores[()] + scores[BOTH] - scores[0,]) / 2
    assert abs(value_of_boston - value_of_lyon) > 1e-3
    return [value_of_boston, value_of_lyon]


ROWS_OF_WARDS = [
    torch.arange(0, SAMPLES, 2),
    torch.arange(1, SAMPLES, 2),
]
SIZES_OF_WARDS = [len(rows) for rows in ROWS_OF_WARDS]


def train_on_wards(dataset: Any, **options: Any) -> Case:
    clients = {}
    for ward, rows in zip(("Boston", "Lyon"), ROWS_OF_WARDS):
        clients[ward] = dataset(X[rows], Y[rows])
    data = FederatedDataModule(
        clients=clients, val=TensorDataset(*VAL), batch_size=BATCH, **options
    )
    return Case(data, shuffle_labeled(ROWS_OF_WARDS), SIZES_OF_WARDS)


CASES_OF_WARDS: dict[str, Callable[[Path], Case]] = {
    **CASES,
    "without classes": lambda folder: train_on_wards(TensorDataset, labels=False),
}
BY_LOSS = {"performance": "val_loss", "mode": "min"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streams", BY_LOSS),
        # Classes that the data do not tell are those of the validation samples.
        ("streams", {}),
        ("without classes", {}),
    ],
)
def test_value_of_a_client_is_that_of_all_that_it_trains_on(name, options, tmp_path):
    case = CASES_OF_WARDS[name](tmp_path)
    shadow = ShadowShapley(coalitions="all", **options)
    loop = make_loop(metrics={"value": shadow})

    trainer_for(loop, tmp_path, ROUNDS).fit(Project(), case.data)

    expected = values_by_hand(case, options.get("performance", "accuracy"))
    assert loop.contributions["value"].tolist() == pytest.approx(
        expected,
        abs=1e-6,
    )


class WardData(L.LightningDataModule):
    """A ward's own loader."""

    def __init__(self, ward: int):
        super().__init__()
        self.ward = ward

    def train_dataloader(self):
        stream = Stream(Beats(self.ward), STREAM_SIZES[self.ward])
        return DataLoader(stream, BATCH)


def test_sites_train_on_their_own_streams(tmp_path):
    sites = {}
    for ward in BOTH:
        sites[100 + ward] = Site(
            Project,
            partial(WardData, ward),
            make_loop,
            tmp_path / f"site {ward}",
            upload_seed=SEED,
        )
    names = ["Boston", "Lyon"]
    directory = Directory(
        SiteTransport(sites),
        names,
        agreement(Project(), make_loop()),
        tmp_path / "book.json",
        1,
        0.2,
    )
    directory.gather()
    sizes = [directory.sizes[site] for site in BOTH]
    module = Project()

    loop = make_loop(
        engine=partial(RemoteFederation, directory), metrics={"value": CumulativeShapley()}
    )
    contents = [directory.contents[site] for site in BOTH]
    # The server is not told the classes, which its own samples have.
    data = RemoteData(names, sizes, contents, server_data=ServersSamples())
    trainer_for(loop, tmp_path, ROUNDS).fit(module, data)

    trained = train_by_hand(train_on_streams())
    assert torch.equal(read_parameters(module), trained)
    untrained = read_parameters(Project())
    gain = score_by_hand(trained, "accuracy") - score_by_hand(untrained, "accuracy")
    assert loop.contributions["value"].sum().item() == pytest.approx(gain)
