"""Every client's own model, tested after the last round."""

import torch
from own_models import MEASURES, OwnModels

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.federation import FederatedLoop
from flsv.personalization import Standalone
from flsv.sampling import UniformSampler
from helpers.fits import fit
from helpers.models import Plain


def test_own_models_that_the_loop_holds_are_scored(tmp_path):
    evaluation = ClientEvaluation(keep_trained=True)
    loop = FederatedLoop(
        FedAvg(),
        personalizer=Standalone(),
        sampler=UniformSampler(1),
        evaluation=evaluation,
        seed=1,
    )
    own_models = OwnModels(loop)
    module = Plain()
    initial = flsv.ParameterSpace(module).read(module)

    fit(loop, tmp_path, module, rounds=2, callbacks=[own_models])

    assert 1 <= len(loop.trained) <= 2  # somebody was never drawn

    received = loop.received()
    for client in range(3):
        assert torch.equal(received[client], loop.trained.get(client, initial))
        for measure in MEASURES:
            score = own_models.scores["received"][measure][client]
            assert 0 < score <= 1
            assert own_models.scores["trained"][measure][client] == score
