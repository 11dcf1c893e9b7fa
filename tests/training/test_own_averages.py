"""A user's callback that averages weights batch by batch, as in a Trainer's own loop, is named."""

import copy
import warnings

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from flsv.federation import FederatedLoop
from helpers import warns
from helpers.fits import fit
from helpers.own_callbacks import OwnAverage, RemembersTheStart


def copies_in_list(module):
    return copy.deepcopy(list(module.parameters()))


def copies_by_name(module):
    return copy.deepcopy(dict(module.named_parameters()))


def copied_network(module):
    return copy.deepcopy(module.net)


@pytest.mark.slow
@pytest.mark.parametrize("copies_of", [copies_in_list, copies_by_name, copied_network])
def test_callback_that_averages_weights_of_clients_in_turn_is_named(copies_of, tmp_path):
    average = OwnAverage(copies_of)

    with warns("OwnAverage changes weights of its own while a client trains.* one chain over all"):
        fit(FederatedLoop(seed=1), tmp_path, rounds=1, callbacks=[average])


@pytest.mark.slow
@pytest.mark.parametrize("make_callback", [RemembersTheStart, LearningRateMonitor])
def test_callback_without_an_average_is_not_named(make_callback, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            FederatedLoop(seed=1),
            tmp_path,
            rounds=1,
            callbacks=[make_callback()],
            logger=True,
        )

    assert not any("weights of its own" in str(warning.message) for warning in caught)
