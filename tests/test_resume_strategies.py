"""Federations of several parts, stopped after two of four rounds: clients are drawn, BatchNorm has its buffers.

Each part alone resumes in the checks of flsv.testing."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import PROPORTIONS
from resuming import assert_resumes
from toys import Plain, network, sgd, toy_data

from flsv import ClientEvaluation, FederatedLoop
from flsv.aggregation import CGSV, FedAvg
from flsv.clients.algorithms import FedProx, FedRep, MoreauSGD
from flsv.metrics import (
    CosineGradientShapley,
    DomainRelevance,
)
from flsv.models.mixture import MixtureClient
from flsv.personalization import FedAMP, FedEM, PFedSV, SparsifiedReward
from flsv.sampling import UniformSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")


def mixture() -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=3, network="mlp", network_args={"hidden": [8]}, optimizer=sgd)


def moreau() -> Plain:
    return Plain(network(False), partial(MoreauSGD, lr=0.05, outer_lr=0.02, lamda=15.0, inner_steps=2))


SECOND = {"evaluation": ClientEvaluation(every=2)}
TRAINED = {"evaluation": ClientEvaluation(every=2, models="trained")}
TWO = {"sampler": UniformSampler(2), "local_epochs": 2}
REPUTATIONS = {"aggregator": CGSV(scale=0.5), "metrics": {"cgsv": CosineGradientShapley()}}
JOINING = {"metrics": {"relevance": DomainRelevance()}, "personalizer": PFedSV(k=2, game="joining", shared=0.5)}
HEADS = {"client_algorithm": FedRep(1), "share": ["!head"], "optimizer_state": "persist", "sampler": UniformSampler(3)}

#: The loop's options, the data's, and the module where it is another than ``Plain``.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "cgsv": ({**REPUTATIONS, "personalizer": SparsifiedReward()}, {}, Plain),
    "fedamp": (
        {**TWO, **TRAINED, "personalizer": FedAMP(2.0, 5.0), "client_algorithm": FedProx(0.5, anchor="start")},
        {},
        Plain,
    ),
    "fedem": ({**TWO, **SECOND, "personalizer": FedEM()}, {"proportions": (2, 3, 2, 3)}, mixture),
    "fedrep": ({**SECOND, **HEADS, "local_epochs": 2}, {"proportions": PROPORTIONS}, Plain),
    "pfedme": ({"aggregator": FedAvg("uniform"), **TRAINED}, {}, moreau),
    "pfedsv": (JOINING, {"client_val": 0.3}, partial(Plain, network(False))),
}
#: The least mean accuracy of the clients' own models: they have learned what is kept.
LEARNED = {"fedamp": 0.6, "fedem": 0.6}


@pytest.mark.parametrize("name", RUNS)
def test_resumes_to_the_bit(tmp_path: Path, name: str) -> None:
    options, given, module = RUNS[name]
    loop = assert_resumes(
        lambda: FederatedLoop(seed=2, **copy.deepcopy(options)),
        tmp_path,
        lambda: copy.deepcopy(module)(),
        lambda: toy_data(**given),
    )
    if name in LEARNED:
        assert loop.client_accuracy is not None
        assert float(loop.client_accuracy.mean()) > LEARNED[name]
    assert all(value.isfinite().any() for value in loop.contributions.values())
