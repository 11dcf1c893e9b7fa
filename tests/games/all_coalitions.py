"""Games of three clients whose coalitions are all scored, and the same scores by Lightning."""

import copy
import itertools

import torch

from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.metrics import LeaveOneOut
from helpers.fits import KeepsRounds, fit, plain_trainer

#: The coalitions of three clients.
MASKS = torch.tensor(list(itertools.product([False, True], repeat=3)))


class KeepsUtilities(LeaveOneOut):
    """Scores all coalitions, and keeps the utilities of the last round."""

    def update(self, client_ids, utility, *arguments, **options):
        self.utilities = utility(MASKS)
        super().update(client_ids, utility, *arguments, **options)


def partition_in_three(data):
    return FederatedDataModule(data, SizePartitioner([3, 1, 2]))


def play_all_coalitions(folder, module, data, rounds=1, **performance_options):
    """The utilities ``[8]`` of the last round's coalitions, and the vectors of their models by hand."""
    metric = KeepsUtilities(**performance_options)
    aggregator = KeepsRounds()
    loop = FederatedLoop(aggregator, metrics={"mine": metric}, seed=3)
    fit(loop, folder, module, data, rounds=rounds)

    last_round = aggregator.rounds[-1]
    vectors = [coalition_vector(last_round, mask) for mask in MASKS]
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
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
