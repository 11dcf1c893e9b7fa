"""Games of three clients whose coalitions are all scored, and the same scores by Lightning."""

import copy
import itertools

import torch

from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.metrics import LeaveOneOut
from helpers.fits import fit, plain_trainer

MASKS = torch.tensor(list(itertools.product([False, True], repeat=3)))


class KeepsGames(LeaveOneOut):
    """Plays all coalitions, and keeps each round with the coalitions' utilities."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.__dict__["games"] = []

    @property
    def round_fields(self):
        return {**super().round_fields, "generator": self.keep_round}

    def keep_round(self, round):
        self.games.append([round])
        return round.generator("x")

    def update(self, client_ids, utility, generator=None, round_index=0):
        self.games[-1].append(utility(MASKS))
        super().update(client_ids, utility, generator, round_index)


def partition_in_three(data):
    return FederatedDataModule(data, SizePartitioner([3, 1, 2]))


def play_all_coalitions(folder, module, data, rounds=1, **measures):
    """The utilities ``[8]`` of the last round's coalitions, and their models by hand."""
    metric = KeepsGames(**measures)
    loop = FederatedLoop(metrics={"mine": metric}, seed=3)
    fit(loop, folder, module, data, rounds=rounds)

    round, utilities = metric.games[-1]
    models = []
    for mask in MASKS:
        if mask.any():
            mean = round.client_vectors[mask].double().mean(0)
            models.append(mean.float())
        else:
            models.append(round.global_vector)
    return utilities, models


def validate_with_lightning(module, vector, data, folder):
    """By Lightning: the vector set into a copy, ``trainer.validate``."""
    copied = copy.deepcopy(module)
    ParameterSpace(copied).write(copied, vector)
    trainer = plain_trainer(folder)
    trainer.validate(copied, data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
