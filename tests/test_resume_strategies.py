"""Federations of every algorithm, stopped after two of four rounds: clients are drawn, BatchNorm has its buffers."""

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
from flsv.aggregation import CGSV, FedAvg, FedBuff, StaleStarts
from flsv.clients.algorithms import SCAFFOLD, Ditto, FedDyn, FedDynServer, FedProx, FedRep, MoreauSGD, PerFedAvg
from flsv.metrics import (
    CosineGradientShapley,
    DomainRelevance,
    OneRoundShapley,
    PartialFederatedShapley,
    WassersteinContribution,
)
from flsv.models.mixture import MixtureClient
from flsv.personalization import IFCA, FedAMP, FedEM, FedFomo, PFedHN, PFedSV, SparsifiedReward, Standalone
from flsv.privacy import GaussianPrivacy
from flsv.sampling import SoftmaxSampler, UniformSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")


def mixture() -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=3, network="mlp", network_args={"hidden": [8]}, optimizer=sgd)


def moreau() -> Plain:
    return Plain(network(False), partial(MoreauSGD, lr=0.05, outer_lr=0.02, lamda=15.0, inner_steps=2))


SECOND = {"evaluation": ClientEvaluation(every=2)}
TRAINED = {"evaluation": ClientEvaluation(every=2, models="trained")}
TWO = {"sampler": UniformSampler(2), "local_epochs": 2}
THREE = {"aggregator": FedAvg("uniform"), "sampler": UniformSampler(3), "local_epochs": 2}
plain = partial(Plain, network(False))
FIVE = {"proportions": PROPORTIONS}
SOME = {"proportions": (3, 2, 3, 2), "client_val": 0.3, "drop_last": True}
REPUTATIONS = {"aggregator": CGSV(scale=0.5), "metrics": {"cgsv": CosineGradientShapley()}}
JOINING = {"metrics": {"relevance": DomainRelevance()}, "personalizer": PFedSV(k=2, game="joining", shared=0.5)}
RELEVANCE = {"metrics": {"m": PartialFederatedShapley(momentum=0.75, init="uniform")}}

#: The loop's options, the data's, and the module where it is another than ``Plain``.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "cgsv": ({**REPUTATIONS, "personalizer": SparsifiedReward()}, {}, Plain),
    "ditto": ({**THREE, "client_algorithm": Ditto(0.5, 0.05)}, FIVE, Plain),
    "fedamp": (
        {**TWO, **TRAINED, "personalizer": FedAMP(2.0, 5.0), "client_algorithm": FedProx(0.5, anchor="start")},
        {},
        Plain,
    ),
    "fedbuff": ({"aggregator": FedBuff(), "personalizer": StaleStarts(), "sampler": UniformSampler(2)}, {}, Plain),
    "feddyn": ({**THREE, "aggregator": FedDynServer(), "client_algorithm": FedDyn(0.1)}, FIVE, Plain),
    "fedem": ({**TWO, **SECOND, "personalizer": FedEM()}, {"proportions": (2, 3, 2, 3)}, mixture),
    "fedfomo": ({**TWO, **SECOND, "personalizer": FedFomo(2), "sampler": UniformSampler(3)}, SOME, Plain),
    "fedrep": (
        {**THREE, **SECOND, "client_algorithm": FedRep(1), "share": ["!head"], "optimizer_state": "persist"},
        FIVE,
        Plain,
    ),
    "ifca": ({**SECOND, "personalizer": IFCA(2), "sampler": UniformSampler(2)}, {}, Plain),
    "one round": ({"metrics": {"m": OneRoundShapley(4, performance="negative_loss")}}, {"server_val": 0.3}, Plain),
    "per-fedavg": ({**THREE, "client_algorithm": PerFedAvg(0.05)}, FIVE, Plain),
    "pfedhn": ({**TWO, **SECOND, "personalizer": PFedHN(hidden=20)}, {}, Plain),
    "pfedme": ({"aggregator": FedAvg("uniform"), **TRAINED}, {}, moreau),
    "pfedsv": (JOINING, {"client_val": 0.3}, plain),
    "privacy": ({"uploads": [GaussianPrivacy(0.5, 0.1)], "sampler": UniformSampler(2)}, {}, plain),
    "s-fedavg": ({**RELEVANCE, "sampler": SoftmaxSampler(2, "m", 0.05)}, {}, Plain),
    "scaffold": (
        {**THREE, "client_algorithm": SCAFFOLD()},
        FIVE,
        partial(Plain, optimizer=partial(torch.optim.SGD, lr=0.1)),
    ),
    "standalone": ({**SECOND, "personalizer": Standalone()}, {}, Plain),
    "wasserstein": ({"metrics": {"m": WassersteinContribution(every=2, support=6, iterations=4)}}, {}, Plain),
}
#: The least mean accuracy of the clients' own models: they have learned what is kept.
LEARNED = {"fedamp": 0.6, "fedem": 0.6, "fedfomo": 0.6, "pfedhn": 0.4}


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
