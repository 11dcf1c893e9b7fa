"""A ``WeightedRandomSampler`` of the wrapped training loader: each client draws its own samples by their weights, as
torch does."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from contrib.in_run import fit_in_run, in_run_values_by_hand, make_in_run_loop
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

from flsv import FederatedLoop
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.data.loaders import TensorBatches
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers.data import toy_sets
from helpers.fits import KeepsRounds, fit
from helpers.loops_by_hand import SEED, cross_entropy_of, make_network_without_norm, take_steps
from helpers.models import Plain
from zoo.tasks import Items as TaskItems

TRAIN = toy_sets()[0]
SAMPLES = len(TRAIN)
BATCH = 8
LR = 0.1
#: Rare classes are drawn more often.
WEIGHTS = torch.tensor([1.0, 3.0, 9.0])[TRAIN.tensors[1]]


class Items(TaskItems):
    """The training samples as data that are no tensors, with their labels."""

    targets = TRAIN.tensors[1]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.targets


class Weighted(L.LightningDataModule):
    def __init__(
        self,
        train: Dataset = TRAIN,
        weights: Tensor = WEIGHTS,
        count: int = SAMPLES,
        **options: Any,
    ) -> None:
        super().__init__()
        self.train = train
        self.sampler = WeightedRandomSampler(weights.tolist(), count, **options)
        self.options = {}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=BATCH, sampler=self.sampler, **self.options)


def make_module() -> Plain:
    return Plain(make_network_without_norm(), partial(torch.optim.SGD, lr=LR))


def make_weighted_data(source: L.LightningDataModule, **splits: Any) -> FederatedDataModule:
    data = FederatedDataModule(
        source, SizePartitioner([4, 1, 2]), splits=Splits(client_test=0.2, **splits)
    )
    data.setup("fit")
    return data


def draw_by_torch(
    indices: Tensor,
    count: int,
    *,
    round_index: int,
    client: int,
    epoch: int = 0,
    replacement: bool = True,
) -> list[Any]:
    """Return what torch's own sampler draws of a client's samples in an epoch."""
    draw = generator_for(SEED, "shuffle", round_index, client, epoch)
    sampler = WeightedRandomSampler(WEIGHTS[indices].tolist(), count, replacement, generator=draw)
    return list(DataLoader(Subset(TRAIN, indices.tolist()), batch_size=BATCH, sampler=sampler))


def train_on(model_vector: Tensor, epochs: list[list[Any]]) -> Tensor:
    model = make_network_without_norm()
    space = ParameterSpace(model)
    space.write(model, model_vector)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batches in epochs:
        take_steps(optimizer, cross_entropy_of(model), batches)
    return space.read(model)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("count", "replacement"),
    [(SAMPLES, True), (2 * SAMPLES, True), (SAMPLES // 2, False)],
)
@pytest.mark.parametrize("is_in_memory", [True, False])
def test_each_client_draws_its_samples_by_weight(
    tmp_path: Path, is_in_memory: bool, count: int, replacement: bool
) -> None:
    """An epoch has as many draws of a client's samples as the loader makes of so many."""
    train: Any = TRAIN
    if not is_in_memory:
        train = Items(TRAIN.__getitem__, range(SAMPLES))
    data = make_weighted_data(Weighted(train, count=count, replacement=replacement))
    local_epochs = 2
    loop = FederatedLoop(KeepsRounds(), local_epochs=local_epochs, seed=SEED)
    fit(loop, tmp_path, make_module(), data, rounds=2)

    assert isinstance(data.client_loader(0), TensorBatches) == is_in_memory

    rounds: list[Round] = loop.aggregator.rounds  # type: ignore[attr-defined]
    for round in rounds:
        assert round.num_samples.tolist() == data.num_samples.tolist()
        for client in range(3):
            indices = data.client_indices(client)
            draws = len(indices) * count // SAMPLES
            epochs = []
            for epoch in range(local_epochs):
                batches = draw_by_torch(
                    indices,
                    draws,
                    round_index=round.round_index,
                    client=client,
                    epoch=epoch,
                    replacement=replacement,
                )
                epochs.append(batches)
            assert round.num_steps[client] == sum(map(len, epochs))
            expected = train_on(round.global_vector, epochs)
            assert torch.equal(round.client_vectors[client], expected)


def test_values_of_samples_are_those_of_the_samples_drawn(tmp_path: Path) -> None:
    data = make_weighted_data(Weighted(), server_val=0.2)
    local_epochs = 2
    loop = make_in_run_loop(local_epochs=local_epochs)
    _, sample_values, rounds = fit_in_run(loop, tmp_path, make_module(), data)

    for client in range(3):
        expected = 0.0
        for round in rounds:
            values, _ = in_run_values_by_hand(
                data, round, client, lr=LR, momentum=0.0, window=1, epochs=local_epochs
            )
            expected = expected + values
        torch.testing.assert_close(sample_values[client], expected, rtol=1e-4, atol=1e-6)


def test_weighted_sampler_of_another_number_of_weights_is_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"WeightedRandomSampler has 3 weights, but the training data have {SAMPLES}",
    ):
        make_weighted_data(Weighted(weights=torch.ones(3)))


def test_client_without_enough_weights_above_0_is_refused() -> None:
    samples_of_client = make_weighted_data(Weighted()).client_indices(1)
    no_weight = WEIGHTS.clone()
    no_weight[samples_of_client] = 0
    one_weight = no_weight.clone()
    one_weight[samples_of_client[0]] = 1
    words = "samples of client 1, but only .* have a weight above 0"

    with pytest.raises(ConfigurationError, match=words):
        make_weighted_data(Weighted(weights=no_weight))

    # One sample can be drawn again and again, and not without replacement.
    make_weighted_data(Weighted(weights=one_weight))
    with pytest.raises(ConfigurationError, match="samples of client 1, but only"):
        make_weighted_data(Weighted(weights=one_weight, replacement=False))


def test_run_with_other_weights_is_not_resumed(tmp_path: Path) -> None:
    description = make_weighted_data(Weighted()).describe()
    same_description = make_weighted_data(Weighted()).describe()
    other_description = make_weighted_data(Weighted(weights=2 * WEIGHTS)).describe()

    assert same_description == description
    assert other_description != description
