"""Every part of a federation that flsv has passes the checks of :mod:`flsv.testing`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from dealt_checks import dealt

from flsv import aggregation, attacks, filters, personalization, sampling, uploads
from flsv.aggregation import (
    CGSV,
    Bucketing,
    DivergenceWeighted,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedCE,
    FedNova,
    FedYogi,
    GeometricMedian,
    ServerOptimizer,
    ShapFedWA,
    ShapleySoftmax,
    ShapleyWeighted,
    StaleStarts,
    TrimmedMean,
)
from flsv.attacks import (
    Alignment,
    ALittleIsEnough,
    FalseReports,
    FreeRider,
    GradientPoisoning,
    HeadAlignment,
    InnerProductManipulation,
    MinMax,
    Scaling,
    SignFlip,
)
from flsv.clients import algorithms
from flsv.clients.algorithms import (
    SCAFFOLD,
    Ditto,
    FedDyn,
    FedDynServer,
    FedProx,
    FedRep,
    InRunValues,
    PerFedAvg,
    ShadowTraining,
)
from flsv.filters import CopyFilter, MultiKrum, NormCap, OutlierFilter, SampleCap
from flsv.functional import shapley
from flsv.functional.shapley import ESTIMATORS
from flsv.metrics import ContributionEstimation, CosineGradientShapley, DomainRelevance, InRunShapley, ShadowShapley
from flsv.models.mixture import MixtureClient
from flsv.personalization import (
    IFCA,
    FedAMP,
    FedEM,
    FedFomo,
    HeurFedAMP,
    PFedHN,
    PFedSV,
    ShapFedPersonalizer,
    SparsifiedReward,
    Standalone,
)
from flsv.privacy import GaussianPrivacy
from flsv.sampling import (
    BernoulliSampler,
    FixedCohort,
    FullParticipation,
    PowerOfChoice,
    ShapleyImportanceSampler,
    SoftmaxSampler,
    SystematicShapleySampler,
    UniformSampler,
)
from flsv.testing import AXIOMS, PartCheck, checks_of
from flsv.uploads import Quantized, TopK

Checks = list[PartCheck]

#: Multi-Krum compares three clients at least.
SHUFFLES = {"clients_permuted_in_a_fit": "buckets are of the clients as they are shuffled"}
AGGREGATORS: Sequence[Checks] = [
    checks_of(Bucketing(GeometricMedian()), expected_failures=SHUFFLES),
    checks_of(CGSV("cgsv"), metrics={"cgsv": CosineGradientShapley()}),
    checks_of(DivergenceWeighted()),
    checks_of(FedAdam()),
    checks_of(FedAvg()),
    checks_of(FedAvg("uniform", server_lr=0.5)),
    checks_of(FedAvgM()),
    checks_of(FedBuff(), personalizer=StaleStarts()),
    checks_of(FedCE(), metrics={"fedce": ContributionEstimation()}),
    checks_of(FedDynServer(), client_algorithm=FedDyn()),
    checks_of(FedNova()),
    checks_of(FedYogi()),
    checks_of(GeometricMedian()),
    checks_of(ServerOptimizer(partial(torch.optim.Adam, lr=0.01, amsgrad=True))),
    checks_of(ShapFedWA("cssv")),
    checks_of(ShapleySoftmax()),
    checks_of(ShapleyWeighted()),
    checks_of(TrimmedMean(trim=0.34)),
]
PERSONALIZERS: Sequence[Checks] = [
    checks_of(FedAMP()),
    checks_of(FedEM(), module=partial(MixtureClient, 2, network="softmax", num_classes=3, input_shape=(4,))),
    checks_of(FedFomo()),
    checks_of(HeurFedAMP()),
    checks_of(IFCA(2)),
    checks_of(PFedHN(hidden=4)),
    checks_of(PFedSV(), metrics={"relevance": DomainRelevance()}),
    checks_of(ShapFedPersonalizer()),
    checks_of(SparsifiedReward(), metrics={"cgsv": CosineGradientShapley()}),
    checks_of(StaleStarts(), aggregator=FedBuff()),
    checks_of(Standalone()),
]
SAMPLERS: Sequence[Checks] = [
    checks_of(BernoulliSampler(2.0)),
    checks_of(FixedCohort([0, 2])),
    checks_of(FullParticipation()),
    checks_of(PowerOfChoice(2, candidates=3)),
    checks_of(ShapleyImportanceSampler(2.0)),
    checks_of(SoftmaxSampler(2)),
    checks_of(SystematicShapleySampler(2)),
    checks_of(UniformSampler(2)),
]
ALGORITHMS: Sequence[Checks] = [
    checks_of(Ditto()),
    checks_of(FedDyn(), aggregator=FedDynServer()),
    checks_of(FedProx()),
    checks_of(FedRep(), share=["!head"], local_epochs=2),
    checks_of(InRunValues(), metrics={"in_run": InRunShapley()}),
    checks_of(PerFedAvg(hessian="free")),
    checks_of(SCAFFOLD()),
    checks_of(ShadowTraining(), metrics={"shadow": ShadowShapley()}),
]
UPLOADS: Sequence[Checks] = [
    checks_of(ALittleIsEnough(clients=[0, 2])),
    checks_of(Alignment(clients=[1])),
    checks_of(FalseReports(loss=1.0, clients=[1])),
    checks_of(FreeRider(clients=[1])),
    checks_of(GaussianPrivacy(1.0, 0.5)),
    checks_of(GradientPoisoning(clients=[1])),
    checks_of(HeadAlignment(clients=[1])),
    checks_of(InnerProductManipulation(clients=[0, 2])),
    checks_of(MinMax(clients=[0, 2])),
    checks_of(Quantized(4)),
    checks_of(Scaling(2.0, clients=[1])),
    checks_of(SignFlip(clients=[1])),
    checks_of(TopK(0.3)),
]
FILTERS: Sequence[Checks] = [
    checks_of(CopyFilter(0.7, gap=0.45)),
    checks_of(MultiKrum(byzantine=0, keep=2), sampler=FullParticipation()),
    checks_of(NormCap(1.25)),
    checks_of(OutlierFilter(exclude=True)),
    checks_of(SampleCap(1.25)),
]
LINEAR = ("symmetry", "null player", "linearity")
OTHERS = {
    "banzhaf": {"axioms": LINEAR, "value": None},
    "beta": {"axioms": LINEAR, "value": None},
    "leave_one_out": {"axioms": LINEAR, "value": None},
    "gtg": {"axioms": ("efficiency", "null player")},  # it always draws orders, and stops early
}
ESTIMATES: Sequence[Checks] = [
    checks_of(estimator, **OTHERS.get(name, {"axioms": AXIOMS})) for name, estimator in ESTIMATORS.items()
]
#: What is exported beside the parts.
BASES = {
    "Aggregator", "Attack", "ClientAlgorithm", "ClientContext", "ClientSampler", "Cohort", "Collusion", "Compression",
    "MoreauSGD",
    "Personalized", "Personalizer", "Upload", "UploadContext", "UpdateFilter", "check_order",
    "sanitize_report", "shadow_training", "upload", "with_guard",
}  # fmt: skip


#: That train federations.
IN_FITS = (
    "remote_is_equal",
    "clients_permuted_in_a_fit",
    "vmap_is_equal",
    "state_is_saved",
    "sides_are_apart",
    "weights_are_given",
)


@dealt([AGGREGATORS, PERSONALIZERS, SAMPLERS, ALGORITHMS, UPLOADS, FILTERS, ESTIMATES], IN_FITS)
def test_parts(check: PartCheck) -> None:
    check()


@pytest.mark.parametrize("room", [aggregation, attacks, algorithms, filters, personalization, sampling, uploads])
def test_all_parts_are_here(room: object) -> None:
    tables = (AGGREGATORS, PERSONALIZERS, SAMPLERS, ALGORITHMS, UPLOADS, FILTERS)
    known = {checks[0].case.name for table in tables for checks in table}
    assert set(room.__all__) <= known | BASES  # type: ignore[attr-defined]


def test_all_estimators_are_here() -> None:
    assert {checks[0].case.part for checks in ESTIMATES} == set(shapley.ESTIMATORS.values())
