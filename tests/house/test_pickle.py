"""A loop and its metrics can be copied and pickled, before a fit, within one and after."""

import copy
import pickle
from functools import partial

import pytest
import torch

from flsv import ClientEvaluation
from flsv.aggregation import FedAdam
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, PartialFederatedShapley
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.training.algorithms import FedDyn, FedDynServer
from helpers.data import toy_data
from helpers.fits import fit, same_values, state_vector
from helpers.models import Plain, network

LOOPS = {
    "metrics": lambda: FederatedLoop(
        FedAdam(),
        {
            "cssv": ClassSpecificShapley(),
            "cost": CommunicationCost(),
            "partial": PartialFederatedShapley(),
        },
        uploads=[GaussianPrivacy(1.0, 1.0)],
        seed=1,
    ),
    "own models": lambda: FederatedLoop(
        personalizer=Standalone(),
        optimizer_state="persist",
        evaluation=ClientEvaluation(keep_trained=True),
        seed=1,
    ),
    "two sides": lambda: FederatedLoop(FedDynServer(), client_algorithm=FedDyn(0.1), seed=1),
}


def run(loop, folder):
    module = Plain(network(batch_norm=False), partial(torch.optim.SGD, lr=0.1))
    return state_vector(fit(loop, folder, module, toy_data(server_val=0.3), rounds=2))


@pytest.mark.fast_rows("two sides")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:.*holds rounds of an earlier run")
def test_pickled_loop_fits_to_the_same_bits_before_and_after_a_fit(tmp_path, name):
    loop = LOOPS[name]()
    unfitted_copy = pickle.loads(pickle.dumps(loop))
    expected = run(loop, tmp_path)
    fitted_copy = pickle.loads(pickle.dumps(loop))

    assert same_values(fitted_copy.state_dict(), loop.state_dict())
    assert same_values(fitted_copy.contributions, loop.contributions)
    for metric_name, metric in fitted_copy.metrics.items():
        assert same_values(
            metric.compute(),
            loop.metrics[metric_name].compute(),
        )
    for metric_name, metric in fitted_copy.config.metrics.items():
        assert fitted_copy.metrics[metric_name] is metric

    with pytest.raises(RuntimeError, match=r"Call trainer\.fit first"):
        print(fitted_copy.clients)

    # Either copy can be fitted, and does what the original did.
    for copied in (unfitted_copy, fitted_copy):
        assert torch.equal(run(copied, tmp_path), expected)
        assert same_values(copied.contributions, loop.contributions)
        assert same_values(copied.state.state_dict(), loop.state.state_dict())
    assert fitted_copy.metrics.keys() == loop.metrics.keys()


class WithLambda(Plain):
    def __init__(self):
        super().__init__()
        self.scale = lambda x: 2 * x


def test_loop_is_pickled_after_a_fit_of_a_module_with_a_lambda(tmp_path):
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, tmp_path, WithLambda(), rounds=1)
    assert pickle.loads(pickle.dumps(loop)).round_index == 1
    shown = "FederatedLoop(aggregator=FedAvg(), metrics={'cssv': ClassSpecificShapley()}, seed=1), 1 rounds done"
    assert repr(loop) == shown


def test_pickled_or_copied_loop_holds_neither_the_data_nor_the_trainer(tmp_path):
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, tmp_path)
    assert len(pickle.dumps(loop)) < 20_000
    assert not {"_data", "_reporter", "_boundary"} & vars(copy.deepcopy(loop)).keys()
