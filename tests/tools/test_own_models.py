"""Every client's own model, tested after the last round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import MEASURES, OwnModels
from sklearn.metrics import roc_auc_score

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.federation import FederatedLoop
from flsv.personalization import Standalone
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain


def measures_by_hand(module: Plain, batches: Any) -> list[float]:
    """The measures of a module on some samples."""
    module.eval()
    inputs, labels = zip(*batches)
    x = torch.cat(inputs)
    y = torch.cat(labels)

    with torch.no_grad():
        logits = module(x)

    is_right = (logits.argmax(1) == y).double()
    accuracy = is_right.mean().item()
    recalls = [is_right[y == label].mean().item() for label in y.unique()]
    balanced_accuracy = sum(recalls) / len(recalls)
    auroc = roc_auc_score(
        y,
        logits.double().softmax(1),
        multi_class="ovr",
    )

    return [accuracy, balanced_accuracy, auroc]


def test_own_models_that_the_loop_holds_are_scored(tmp_path: Path) -> None:
    evaluation = ClientEvaluation(keep_trained=True)
    loop = FederatedLoop(
        FedAvg(),
        personalizer=Standalone(),
        sampler=UniformSampler(1),
        evaluation=evaluation,
        seed=1,
    )
    own_models = OwnModels(loop)
    data = toy_data()
    module = Plain()
    initial = flsv.ParameterSpace(module).read(module)

    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own_models])

    assert 1 <= len(loop.trained) <= 2  # somebody was never drawn

    received = loop.received()
    assert MEASURES == ("accuracy", "balanced_accuracy", "auroc")

    for client in range(3):
        assert torch.equal(received[client], loop.trained.get(client, initial))
        loop.space.write(module, received[client])
        expected = measures_by_hand(module, data.test_dataloader())
        for models in ("received", "trained"):
            scores = own_models.scores[models]
            scores_of_client = [scores[measure][client].item() for measure in MEASURES]
            assert scores_of_client == pytest.approx(expected, abs=1e-6)
