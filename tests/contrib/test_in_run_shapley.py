"""InRunShapley in a federation: values against gradients of single samples, and who may and may not have them."""

import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from contrib.in_run import fit_in_run, in_run_values_by_hand, make_in_run_data, make_in_run_loop
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import FederatedDataModule, Loader, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, ContributionMetric, ShadowShapley
from flsv.retraining.price import PriceList
from flsv.testing import parametrize_with_checks
from helpers import refused
from helpers.data import CLASSES, toy_sets
from helpers.fits import KeepsRounds, fit, state_vector
from helpers.loops_by_hand import SEED, make_network_without_norm
from helpers.models import Plain, adam, make_sgd, network
from helpers.runs import read_rows
from zoo.tasks import Regression


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("momentum", "window", "epochs", "limit", "every"),
    [
        (0.0, 1, 1, None, 1),
        (0.9, 1, 2, None, 1),
        (0.5, 2, 1, None, 1),
        (0.9, 1, 2, 1, 1),
        (0.0, 1, 1, None, 4),
    ],
    ids=["plain", "momentum", "windows", "limit", "every fourth step"],
)
def test_in_run_value_of_every_sample_equals_that_by_hand(
    tmp_path, momentum, window, epochs, limit, every
):
    dealt = make_in_run_data()
    loop = make_in_run_loop(every, local_epochs=epochs, aggregator=KeepsRounds(server_lr=0.5))

    values, sample_values, rounds = fit_in_run(
        loop,
        tmp_path,
        Plain(make_network_without_norm(), make_sgd(momentum=momentum)),
        dealt,
        accumulate_grad_batches=window,
        limit_train_batches=limit,
    )

    counts = dealt.class_counts
    expected = torch.zeros(3, CLASSES, dtype=torch.float64)
    for client in range(3):
        samples = torch.zeros(int(counts[client].sum()), dtype=torch.float64)
        labels = torch.cat([y for _, y in dealt.client_loader(client, "train", shuffle=False)])
        for round in rounds:
            round_values, model = in_run_values_by_hand(
                dealt,
                round,
                client,
                lr=0.1,
                momentum=momentum,
                window=window,
                epochs=epochs,
                limit=limit,
                every=every,
            )
            assert_close(model, round.client_vectors[client], atol=1e-6, rtol=0)
            samples += round_values
            assert round.aggregation_weights is not None
            weight = 0.5 * round.aggregation_weights[client].double()
            for c in range(CLASSES):
                expected[client, c] += weight * round_values[labels == c].sum()
        assert_close(sample_values[client], samples, atol=1e-6, rtol=1e-4)

    assert_close(values[:, :CLASSES], expected, atol=1e-6, rtol=1e-4)
    rest_of_values = values[:, CLASSES]  # what the samples leave of the clients' values
    assert (rest_of_values.abs().max() < 1e-5) == (every == 1)
    assert loop.channel.names() >= {("down", "validation_gradient"), ("up", "in_run_values")}

    uploaded = loop.channel.numbers([0], "up")
    assert uploaded.tolist() == [len(rounds[0].global_vector) + CLASSES]


@pytest.mark.slow
def test_a_client_cannot_raise_its_value_by_its_report(tmp_path):
    class RaisesItsReport(InRunValues):
        def report(self, local):
            return {name: 100 + value for name, value in super().report(local).items()}

    honest_loop = make_in_run_loop()
    lying_loop = make_in_run_loop().replace(
        client_algorithm=RaisesItsReport(),
        metrics={"in_run": InRunShapley()},
        aggregator=KeepsRounds(),
    )

    honest_values, *_ = fit_in_run(honest_loop, tmp_path)
    lying_values, *_ = fit_in_run(lying_loop, tmp_path)

    # Columns: the classes, and the rest of the value, from which the report takes what it adds.
    raised_by = lying_values[:, :CLASSES] - honest_values[:, :CLASSES]
    assert (raised_by > 1).all()
    assert_close(lying_values.sum(1), honest_values.sum(1), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_in_run_values_are_in_the_clients_own_files_and_leave_training_bitwise_unchanged(
    tmp_path,
):
    loop = make_in_run_loop(reporting=Reporting(figures=1))
    module = Plain(make_network_without_norm())
    plain_loop = FederatedLoop(KeepsRounds(), seed=SEED)
    plain_module = Plain(make_network_without_norm())

    _, sample_values, _ = fit_in_run(loop, tmp_path, module, logger=True)
    fit(plain_loop, tmp_path / "plain", plain_module, make_in_run_data(), rounds=2)

    assert torch.equal(state_vector(module), state_vector(plain_module))
    assert not any(layer._forward_hooks for layer in module.modules())
    for client in range(3):
        (path,) = tmp_path.rglob(f"clients/{client}/in_run_values.csv")
        rows = read_rows(path)
        values = [float(row["value"]) for row in rows]
        assert list(rows[0]) == ["sample", "value"]
        assert values == sample_values[client].tolist()


class WeighsByValues(KeepsRounds):
    """Training depends on the in-run values."""

    metric = "in_run"

    def weights(self, round, contributions):
        values = torch.zeros(3)
        if "in_run" in contributions:
            values = contributions["in_run"].sum(1)
        return values[round.client_ids].softmax(0).double()


def values_of_coalitions(folder, aggregator, **arguments):
    metrics = {"shadow": ShadowShapley(coalitions="all"), **arguments.pop("metrics", {})}
    loop = FederatedLoop(aggregator, metrics, seed=SEED, **arguments)
    fit(loop, folder, Plain(make_network_without_norm()), make_in_run_data(), rounds=2)
    assert loop.run.coalition_differences == []
    return loop.values["shadow"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_coalitions_are_trained_without_values_of_samples(tmp_path, monkeypatch, at_once):
    price = 0.0 if at_once else math.inf
    monkeypatch.setattr(PriceList, "at_once", lambda self, masks: price)
    in_run = {"metrics": {"in_run": InRunShapley()}, "client_algorithm": InRunValues()}

    values = values_of_coalitions(tmp_path / "in_run", FedAvg(), **in_run)
    expected = values_of_coalitions(tmp_path / "alone", FedAvg())

    assert torch.equal(values.value, expected.value)
    assert values.evidence == expected.evidence


@pytest.mark.slow
def test_coalitions_have_values_of_samples_where_the_aggregate_depends_on_them(tmp_path):
    in_run = {"metrics": {"in_run": InRunShapley()}, "client_algorithm": InRunValues()}

    values = values_of_coalitions(tmp_path, WeighsByValues(), **in_run)

    assert values.value.isfinite().all()


class Penalty(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(
            p.square().sum() for p in self.parameters()
        )


class SoftLabels(Plain):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        training = self._trainer is not None and self.trainer.training
        return (batch[0], 0.9 * F.one_hot(batch[1], CLASSES) + 0.1 / CLASSES) if training else batch


def make_numbers():
    samples = TensorDataset(torch.randn(20, 3), torch.randn(20))
    return FederatedDataModule(samples, SizePartitioner([3, 1]), batch_size=8)


REFUSED = {
    "Adam": (
        make_in_run_loop,
        lambda: Plain(make_network_without_norm(), adam),
        "one torch.optim.SGD with a single learning rate",
    ),
    "Nesterov": (
        make_in_run_loop,
        lambda: Plain(make_network_without_norm(), make_sgd(momentum=0.5, nesterov=True)),
        "without nesterov",
    ),
    "one side": (
        lambda: make_in_run_loop().replace(metrics={"cssv": ClassSpecificShapley()}),
        lambda: Plain(make_network_without_norm()),
        "needs an InRunShapley metric",
    ),
    "BatchNorm": (
        make_in_run_loop,
        lambda: Plain(network(batch_norm=True)),
        "BatchNorm1d, mixes the samples",
    ),
    "penalty": (
        make_in_run_loop,
        lambda: Penalty(make_network_without_norm()),
        "computed outside the layers' forward",
    ),
    "no classes": (
        make_in_run_loop,
        lambda: SoftLabels(make_network_without_norm()),
        r"batches \(x, y\) with the class of every sample",
    ),
    "numbers": (
        make_in_run_loop,
        Regression,
        r"have no classes: .*; or name a loss that .* logs: InRunShapley\(loss='val_loss'\)",
    ),
    "vmap": (
        lambda: make_in_run_loop(engine="vmap"),
        lambda: Plain(make_network_without_norm()),
        'engine="vmap" trains many clients as one',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_in_run_shapley_with_an_unsupported_setting_is_refused(tmp_path, name):
    make, module_of, says = REFUSED[name]
    loop = make()
    module = module_of()
    data = make_numbers() if name == "numbers" else make_in_run_data()

    with refused(says):
        fit(loop, tmp_path, module, data, rounds=1)

    assert loop.round_index == 0
    assert not any(layer._forward_hooks for layer in module.modules())


def collate_by_size(samples: list[tuple[Tensor, Tensor]]):
    """Sorts a batch, as is usual for texts by their lengths."""
    return torch.utils.data.default_collate(
        sorted(samples, key=lambda sample: float(sample[0].sum()))
    )


class Sorted(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(toy_sets()[0], batch_size=8, collate_fn=collate_by_size)


@pytest.mark.slow
def test_data_whose_sample_order_changes_is_refused(tmp_path):
    dealt = FederatedDataModule(
        Sorted(),
        SizePartitioner([4, 1, 2]),
        splits=Splits(server_val=0.2),
        loader=Loader(preload=False),
    )
    with refused(r"training sample \d+ of client"):
        fit(
            make_in_run_loop(local_epochs=1),
            tmp_path,
            Plain(make_network_without_norm()),
            dealt,
            rounds=2,
        )


class CountsReports(ContributionMetric):
    """A metric that reads the reports, and follows no loss."""

    per_class = False

    def init_states(self, num_clients, num_classes):
        self.add_state("counts", torch.zeros(num_clients), dist_reduce_fx="sum")

    def update(self, client_ids, in_run_values):
        self.counts[client_ids] += 1

    def compute(self):
        return self.counts


def test_clients_follow_the_loss_of_the_metric_that_names_one():
    metric = InRunShapley(loss="val_loss")
    module = Plain(make_network_without_norm())
    info = SimpleNamespace(
        metrics={"reports": CountsReports(), "in_run": metric},
        optimizers=[module.configure_optimizers()],
    )
    algorithm = InRunValues()

    algorithm.set_up(info)

    assert algorithm._loss is metric.measure


@pytest.mark.by_turn
@pytest.mark.fast_rows
@parametrize_with_checks(
    [InRunShapley()],
    given={"in_run_values": lambda round: round.client_updates[:, :3].double()},
    client_algorithm=InRunValues(),
)
def test_metric_passes_the_checks(check):
    check()


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*trains_alone")
@parametrize_with_checks(
    [InRunValues()],
    metrics={"in_run": InRunShapley()},
    expected_failures={"odd_rounds_end": "BatchNorm has no gradient of one sample"},
)
def test_client_algorithm_passes_the_checks(check):
    check()
