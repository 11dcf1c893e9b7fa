"""What steps hang on beside parameters, buffers and the batch: rows come to what models come to one after the other, or
are refused before training."""

import pytest
import torch

from flsv import FederatedLoop, Reporting
from helpers import refused
from helpers.coalitions_by_hand import SEED, make_three_clients
from helpers.fits import fit, state_vector
from helpers.models import STEP_CASES


def make_loop(**options):
    return FederatedLoop(seed=SEED, reporting=Reporting(table=False, files=False), **options)


def fit_case(name, folder, federation, module):
    """The module after a fit of two rounds."""
    make_callbacks = STEP_CASES[name][1]
    return fit(
        federation,
        folder,
        module,
        make_three_clients(),
        rounds=2,
        callbacks=make_callbacks(),
    )


def make_seeded_module(name):
    make_module = STEP_CASES[name][0]
    torch.manual_seed(SEED)
    return make_module()


def check_that_case_is_refused(name, folder, words):
    """Before the first round, with the module as it was."""
    federation = make_loop(engine="vmap")
    module = make_seeded_module(name)
    initial_vector = state_vector(module)

    with refused(words):
        fit_case(name, folder, federation, module)

    assert federation.round_index == 0
    assert torch.equal(state_vector(module), initial_vector)


@pytest.mark.fast_rows(
    "annealed per batch by a callback", "torchmetrics", "accumulated", "a timer*"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEP_CASES)
def test_vmap_clients_equal_sequential_ones_or_are_refused(tmp_path, name):
    _, _, words_of_refusal = STEP_CASES[name]
    if words_of_refusal is not None:
        check_that_case_is_refused(name, tmp_path, words_of_refusal)
        return

    at_once = fit_case(name, tmp_path, make_loop(engine="vmap"), make_seeded_module(name))
    in_turn = fit_case(name, tmp_path, make_loop(), make_seeded_module(name))

    expected = state_vector(in_turn)
    torch.testing.assert_close(state_vector(at_once), expected, rtol=1e-5, atol=1e-5)
