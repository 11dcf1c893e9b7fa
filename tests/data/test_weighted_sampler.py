"""A ``WeightedRandomSampler`` of the wrapped training loader: each client draws its own samples by their weights, as
torch does."""

from functools import partial

import pytest
import torch
from contrib.in_run import fit_in_run, in_run_values_by_hand, make_in_run_loop
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from flsv import FederatedLoop
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.data import SizePartitioner
from flsv.data.loaders import TensorBatches
from flsv.utilities.seeding import generator_for
from helpers import refused
from helpers.data import DataModuleOfLoader, Items, set_up_data, toy_sets
from helpers.fits import KeepsRounds, fit
from helpers.loops_by_hand import SEED, cross_entropy_of, make_network_without_norm, take_steps
from helpers.models import Plain

TRAIN = toy_sets()[0]
SAMPLES = len(TRAIN)
BATCH = 8
LR = 0.1
LOCAL_EPOCHS = 2
NUM_CLIENTS = 3
#: Rare classes are drawn more often.
WEIGHTS = torch.tensor([1.0, 3.0, 9.0])[TRAIN.tensors[1]]


READ_ONE_BY_ONE = Items(TRAIN, targets=TRAIN.tensors[1])


def make_source(train=TRAIN, weights=WEIGHTS, num_draws=SAMPLES, replacement=True):
    sampler = WeightedRandomSampler(weights.tolist(), num_draws, replacement)
    return DataModuleOfLoader(DataLoader(train, batch_size=BATCH, sampler=sampler))


def make_module():
    return Plain(make_network_without_norm(), partial(torch.optim.SGD, lr=LR))


def make_weighted_data(source, **options):
    return set_up_data(source, SizePartitioner([4, 1, 2]), client_test=0.2, **options)


class DrawsOfTorch:
    """Batches as torch's own sampler draws them of a client's samples."""

    def __init__(self, draws_per_sample, replacement):
        self.draws_per_sample = draws_per_sample
        self.replacement = replacement

    def batches_of_epoch(self, indices, generator):
        num_draws = int(self.draws_per_sample * len(indices))
        sampler = WeightedRandomSampler(
            WEIGHTS[indices].tolist(), num_draws, self.replacement, generator=generator
        )
        samples = Subset(TRAIN, indices.tolist())
        return list(DataLoader(samples, batch_size=BATCH, sampler=sampler))

    def batches_of_visit(self, indices, round_index, client):
        batches = []
        for epoch in range(LOCAL_EPOCHS):
            generator = generator_for(SEED, "shuffle", round_index, client, epoch)
            batches += self.batches_of_epoch(indices, generator)
        return batches


def train_by_hand(model_vector, batches):
    model = make_network_without_norm()
    space = ParameterSpace(model)
    space.write(model, model_vector)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    take_steps(optimizer, cross_entropy_of(model), batches)
    return space.read(model)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(("draws_per_sample", "replacement"), [(1, True), (2, True), (0.5, False)])
@pytest.mark.parametrize("train", [TRAIN, READ_ONE_BY_ONE], ids=["in memory", "read one by one"])
def test_each_client_draws_its_samples_by_weight(tmp_path, train, draws_per_sample, replacement):
    draws_of_source = int(draws_per_sample * SAMPLES)
    data = make_weighted_data(
        make_source(train, num_draws=draws_of_source, replacement=replacement)
    )
    loop = FederatedLoop(KeepsRounds(), local_epochs=LOCAL_EPOCHS, seed=SEED)

    fit(loop, tmp_path, make_module(), data, rounds=2)

    draws = DrawsOfTorch(draws_per_sample, replacement)
    rounds: list[Round] = loop.aggregator.rounds
    for round in rounds:
        assert round.num_samples.tolist() == data.num_samples.tolist()
        for client in range(NUM_CLIENTS):
            indices = data.client_indices(client)
            batches = draws.batches_of_visit(indices, round.round_index, client)
            expected_model = train_by_hand(round.global_vector, batches)
            assert round.num_steps[client] == len(batches)
            assert torch.equal(round.client_vectors[client], expected_model)


def test_samples_in_memory_are_drawn_as_tensors_by_weight():
    data = make_weighted_data(make_source(TRAIN))

    assert isinstance(data.client_loader(0), TensorBatches)


@pytest.mark.slow
def test_values_of_samples_are_those_of_the_samples_drawn(tmp_path):
    data = make_weighted_data(make_source(), server_val=0.2)
    loop = make_in_run_loop(local_epochs=LOCAL_EPOCHS)
    _, sample_values, rounds = fit_in_run(loop, tmp_path, make_module(), data)

    training = {"lr": LR, "momentum": 0.0, "window": 1, "epochs": LOCAL_EPOCHS}
    for client in range(NUM_CLIENTS):
        values_of_rounds = []
        for round in rounds:
            values, _ = in_run_values_by_hand(data, round, client, **training)
            values_of_rounds.append(values)
        expected_values = torch.stack(values_of_rounds).sum(0)
        torch.testing.assert_close(sample_values[client], expected_values, rtol=1e-4, atol=1e-6)


def test_weighted_sampler_of_another_number_of_weights_is_refused():
    with refused(f"WeightedRandomSampler has 3 weights, but the training data have {SAMPLES}"):
        make_weighted_data(make_source(weights=torch.ones(3)))


def weights_with_some_of_client_1(num_positive):
    """Weights that are above 0 for so many samples of client 1."""
    samples_of_client = make_weighted_data(make_source()).client_indices(1)
    weights = WEIGHTS.clone()
    weights[samples_of_client[num_positive:]] = 0
    return weights


@pytest.mark.parametrize(("num_positive", "replacement"), [(0, True), (1, False)])
def test_client_without_enough_weights_above_0_is_refused(num_positive, replacement):
    weights = weights_with_some_of_client_1(num_positive)
    source = make_source(weights=weights, replacement=replacement)

    with refused("samples of client 1, but only .* have a weight above 0"):
        make_weighted_data(source)


def test_client_with_one_weight_above_0_draws_its_sample_again_and_again():
    weights = weights_with_some_of_client_1(num_positive=1)

    data = make_weighted_data(make_source(weights=weights, replacement=True))

    assert len(data.client_indices(1)) > 1


def describe_data(weights):
    return make_weighted_data(make_source(weights=weights)).describe()


def test_description_of_the_data_depends_on_the_weights():
    description = describe_data(WEIGHTS)

    assert describe_data(WEIGHTS.clone()) == description
    assert describe_data(2 * WEIGHTS) != description
