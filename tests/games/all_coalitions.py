"""Games of three clients whose coalitions are all scored, and the same scores by Lightning."""

import copy
import itertools

import torch

from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.metrics import LeaveOneOut
from helpers.fits import fit, plain_trainer

#: The coalitions of three clients.
ROWS = list(itertools.product([False, True], repeat=3))
MASKS = torch.tensor(ROWS)


class KeepsLastGame(LeaveOneOut):
    """Scores all coalitions, and keeps the last round with their utilities."""

    @property
    def round_fields(self):
        return {**super().round_fields, "generator": self.keep_round}

    def keep_round(self, round):
        self.last_round = round
        return round.generator("x")

    def update(self, client_ids, utility, generator=None, round_index=0):
        self.utilities = utility(MASKS)
        super().update(client_ids, utility, generator, round_index)


def partition_in_three(data):
    return FederatedDataModule(data, SizePartitioner([3, 1, 2]))


def play_all_coalitions(folder, module, data, rounds=1, **performance_options):
    """The utilities ``[8]`` of the last round's coalitions, and the vectors of their models by hand."""
    metric = KeepsLastGame(**performance_options)
    loop = FederatedLoop(metrics={"mine": metric}, seed=3)
    fit(loop, folder, module, data, rounds=rounds)

    vectors = []
    for mask in MASKS:
        vectors.append(coalition_vector(metric.last_round, mask))
    return metric.utilities, vectors


def coalition_vector(round, mask):
    """Return the members' average, or the global model's vector for nobody."""
    if not mask.any():
        return round.global_vector
    members = round.client_vectors[mask]
    mean = members.double().mean(0)
    return mean.float()


def validate_with_lightning(module, vector, data, folder):
    """Return what ``trainer.validate`` logs of a copy of the module with this vector."""
    copied_module = copy.deepcopy(module)
    ParameterSpace(copied_module).write(copied_module, vector)
    trainer = plain_trainer(folder)
    trainer.validate(copied_module, data, verbose=False)
    logged_values = {}
    for name, value in trainer.callback_metrics.items():
        logged_values[name] = float(value)
    return logged_values
