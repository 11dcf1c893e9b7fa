"""The game by retraining: every coalition is a federation of its own, and is trained once."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch

from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.functional import exact_shapley, permutation_shapley
from flsv.models.classifier import ClassifierClient
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data, toy_sets
from helpers.fits import state_vector, trainer_for
from helpers.models import Plain, network

Fits = list[list[int]]


def make_trainers(folder: Path, fits: Fits, rounds: int = 2) -> Callable[[FixedCohort], L.Trainer]:
    def trainer(cohort: FixedCohort) -> L.Trainer:
        fits.append(cohort.clients)
        return trainer_for(
            FederatedLoop(sampler=cohort, seed=5), folder, rounds, limit_val_batches=0
        )

    return trainer


def make_data() -> FederatedDataModule:
    return toy_data(server_val=0.3)


def make_masks(*coalitions: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([[i in members for i in range(3)] for members in coalitions])


def test_lazily_built_module_starts_all_coalitions_from_the_same_weights(tmp_path: Path) -> None:
    initial_vectors: list[torch.Tensor] = []

    class RecordInitialVector(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            initial_vectors.append(state_vector(pl_module))

    def make_trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(sampler=cohort, seed=5)
        return trainer_for(
            loop, tmp_path, 1, callbacks=[RecordInitialVector()], limit_val_batches=0
        )

    utility = RetrainedUtility(make_trainer, ClassifierClient("mlp"), make_data(), "auroc")

    utilities = utility(make_masks((0,), (1, 2), (0, 1, 2)))

    assert (utilities > 0).all()
    assert (utilities < 1).all()
    assert len(initial_vectors) == 3
    assert initial_vectors[0].abs().sum() > 0
    assert torch.equal(initial_vectors[1], initial_vectors[0])
    assert torch.equal(initial_vectors[2], initial_vectors[0])


def test_retrained_utility_trains_each_coalition_once(tmp_path: Path) -> None:
    fits = Fits()
    utility = RetrainedUtility(make_trainers(tmp_path, fits, rounds=1), Plain(), make_data())

    exact = exact_shapley(utility, utility.num_players)
    coalitions_of_exact = sorted(fits)
    sampled = permutation_shapley(
        utility, 3, num_permutations=200, generator=torch.Generator().manual_seed(0)
    )

    assert coalitions_of_exact == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 2],
        [1],
        [1, 2],
        [2],
    ]
    assert sorted(fits) == coalitions_of_exact
    torch.testing.assert_close(sampled.values, exact.values, rtol=0, atol=0.05)
    assert all(utility.seconds[tuple(members)] > 0 for members in fits)


def test_retrained_utility_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    make_trainer = make_trainers(tmp_path, [])
    many = FederatedDataModule(
        toy_sets(),
        SizePartitioner([1.0] * 9),
        batch_size=8,
    )
    message = "9 clients make 511 federations"

    with pytest.raises(ConfigurationError, match=message):
        RetrainedUtility(make_trainer, Plain(), many)

    allowed = RetrainedUtility(make_trainer, Plain(), many, max_clients=9)
    assert allowed.num_players == 9

    message = r"metric='f2'\): .*A value that the module logs"
    with pytest.raises(ConfigurationError, match=message):
        RetrainedUtility(make_trainer, Plain(), make_data(), metric="f2")

    without_validation = toy_data(server_val=0.0)
    utility = RetrainedUtility(make_trainer, Plain(), without_validation)

    with pytest.raises(ConfigurationError, match="samples"):
        utility(make_masks((0,)))


def test_retrained_utility_with_private_layers_is_refused(tmp_path: Path) -> None:
    def trainer(cohort: FixedCohort) -> L.Trainer:
        return trainer_for(
            FederatedLoop(sampler=cohort, share=["!head"], seed=5), tmp_path, 1, limit_val_batches=0
        )

    with pytest.raises(
        ConfigurationError, match=r"RetrainedUtility .* share=\['!head'\] a part of it stays"
    ):
        RetrainedUtility(trainer, Plain(network()), make_data())(make_masks((1,)))
