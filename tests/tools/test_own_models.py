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
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain


def by_hand(module: Plain, batches: Any) -> list[float]:
    """The measures of a module on some samples."""
    module.eval()
    x, y = (torch.cat(parts) for parts in zip(*batches))
    with torch.no_grad():
        logits = module(x)
    right = (logits.argmax(1) == y).double()
    balanced = torch.stack([right[y == label].mean() for label in y.unique()]).mean()
    area = roc_auc_score(y, logits.double().softmax(1), multi_class="ovr")
    return [right.mean().item(), balanced.item(), area]


def test_own_models_that_the_loop_holds_are_scored(tmp_path: Path) -> None:
    evaluation = ClientEvaluation(keep_trained=True)
    loop = FederatedLoop(
        FedAvg(),
        personalizer=Standalone(),
        sampler=UniformSampler(1),
        evaluation=evaluation,
        seed=1,
    )
    own, data, module = OwnModels(loop), toy_data(), Plain()
    initial = flsv.ParameterSpace(module).read(module)
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    assert 1 <= len(loop.trained) <= 2  # somebody was never drawn
    received = loop.received()
    assert MEASURES == ("accuracy", "balanced_accuracy", "auroc")
    for client in range(3):
        assert torch.equal(received[client], loop.trained.get(client, initial))
        loop.space.write(module, received[client])
        expected = by_hand(module, data.test_dataloader())
        for models in ("received", "trained"):
            assert [own.scores[models][m][client].item() for m in MEASURES] == pytest.approx(
                expected, abs=1e-6
            )


def test_own_tests_score_each_client_on_its_test_split(tmp_path: Path) -> None:
    evaluation = ClientEvaluation(every=2, keep_trained=True)
    loop = FederatedLoop(FedAvg(), personalizer=Standalone(), evaluation=evaluation, seed=1)
    own, data, module = OwnModels(loop, tests="own"), toy_data(), Plain()
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    for measure in MEASURES:
        torch.testing.assert_close(
            own.scores["received"][measure].float(), loop.client_scores[measure]
        )
    module.eval()
    parts = [
        [torch.cat(each) for each in zip(*data.client_loader(client, "test"))]
        for client in range(3)
    ]
    right = [(module(x).argmax(1) == y).double().mean().item() for x, y in parts]
    assert own.scores["global"]["accuracy"].item() == pytest.approx(sum(right) / 3)


def test_own_tests_without_test_samples_are_refused(tmp_path: Path) -> None:
    loop = FederatedLoop(evaluation=ClientEvaluation(keep_trained=True), seed=1)
    with pytest.raises(ConfigurationError, match=r'tests="own" .* clients \[0, 1, 2\] have none'):
        fit(
            loop, tmp_path, data=toy_data(client_test=0.0), callbacks=[OwnModels(loop, tests="own")]
        )
