"""Every part of a federation that flsv has passes the checks of :mod:`flsv.testing`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from dealt_checks import dealt
from jsonargparse._typehints import get_all_subclass_paths
from own_cases import MORE, PersonalizerCase, SamplerCase
from own_uploads import FilterCase, UploadCase

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
)
from flsv.filters import CopyFilter, MultiKrum, NormCap, OutlierFilter, SampleCap
from flsv.loop.shadow import ShadowTraining
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
from flsv.testing.checks import PartCheck, checks_of
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase
from flsv.uploads import Quantized, TopK

Checks = list[PartCheck]


def aggregator(part: Any, **options: Any) -> Checks:
    return checks_of(AggregatorCase(part, **options), MORE)


def personalizer(part: Any, **options: Any) -> Checks:
    return checks_of(PersonalizerCase(part, **options))


def sampler(part: Any, **options: Any) -> Checks:
    return checks_of(SamplerCase(part, **options))


def algorithm(part: Any, **options: Any) -> Checks:
    return checks_of(ClientAlgorithmCase(part, **options), MORE)


def upload(part: Any, **options: Any) -> Checks:
    return checks_of(UploadCase(part, **options))


def update_filter(part: Any, **options: Any) -> Checks:
    return checks_of(FilterCase(part, **options))


#: Multi-Krum compares three clients at least.
SHUFFLES = {"clients_permuted_in_a_fit": "buckets are of the clients as they are shuffled"}
AGGREGATORS: Sequence[Checks] = [
    aggregator(Bucketing(GeometricMedian()), expected_failures=SHUFFLES),
    aggregator(CGSV("cgsv"), metrics={"cgsv": CosineGradientShapley()}),
    aggregator(DivergenceWeighted()),
    aggregator(FedAdam()),
    aggregator(FedAvg()),
    aggregator(FedAvg("uniform", server_lr=0.5)),
    aggregator(FedAvgM()),
    aggregator(FedBuff(), personalizer=StaleStarts()),
    aggregator(FedCE(), metrics={"fedce": ContributionEstimation()}),
    aggregator(FedDynServer(), client_algorithm=FedDyn()),
    aggregator(FedNova()),
    aggregator(FedYogi()),
    aggregator(GeometricMedian()),
    aggregator(ServerOptimizer(partial(torch.optim.Adam, lr=0.01, amsgrad=True))),
    aggregator(ShapFedWA("cssv")),
    aggregator(ShapleySoftmax()),
    aggregator(ShapleyWeighted()),
    aggregator(TrimmedMean(trim=0.34)),
]
PERSONALIZERS: Sequence[Checks] = [
    personalizer(FedAMP()),
    personalizer(FedEM(), module=partial(MixtureClient, 2, network="softmax", num_classes=3, input_shape=(4,))),
    personalizer(FedFomo()),
    personalizer(HeurFedAMP()),
    personalizer(IFCA(2)),
    personalizer(PFedHN(hidden=4)),
    personalizer(PFedSV(), metrics={"relevance": DomainRelevance()}),
    personalizer(ShapFedPersonalizer()),
    personalizer(SparsifiedReward(), metrics={"cgsv": CosineGradientShapley()}),
    personalizer(StaleStarts(), aggregator=FedBuff()),
    personalizer(Standalone()),
]
SAMPLERS: Sequence[Checks] = [
    sampler(BernoulliSampler(2.0)),
    sampler(FixedCohort([0, 2])),
    sampler(FullParticipation()),
    sampler(PowerOfChoice(2, candidates=3)),
    sampler(ShapleyImportanceSampler(2.0)),
    sampler(SoftmaxSampler(2)),
    sampler(SystematicShapleySampler(2)),
    sampler(UniformSampler(2)),
]
ALGORITHMS: Sequence[Checks] = [
    algorithm(Ditto()),
    algorithm(FedDyn(), aggregator=FedDynServer()),
    algorithm(FedProx()),
    algorithm(FedRep(), share=["!head"], local_epochs=2),
    algorithm(InRunValues(), metrics={"in_run": InRunShapley()}),
    algorithm(PerFedAvg(hessian="free")),
    algorithm(SCAFFOLD()),
    algorithm(ShadowTraining(), metrics={"shadow": ShadowShapley()}),
]
UPLOADS: Sequence[Checks] = [
    upload(ALittleIsEnough(clients=[0, 2])),
    upload(Alignment(clients=[1])),
    upload(FalseReports(loss=1.0, clients=[1])),
    upload(FreeRider(clients=[1])),
    upload(GaussianPrivacy(1.0, 0.5)),
    upload(GradientPoisoning(clients=[1])),
    upload(HeadAlignment(clients=[1])),
    upload(InnerProductManipulation(clients=[0, 2])),
    upload(MinMax(clients=[0, 2])),
    upload(Quantized(4)),
    upload(Scaling(2.0, clients=[1])),
    upload(SignFlip(clients=[1])),
    upload(TopK(0.3)),
]
FILTERS: Sequence[Checks] = [
    update_filter(CopyFilter(0.7, gap=0.45)),
    update_filter(MultiKrum(byzantine=0, keep=2), sampler=FullParticipation()),
    update_filter(NormCap(1.25)),
    update_filter(OutlierFilter(exclude=True)),
    update_filter(SampleCap(1.25)),
]
#: What is exported beside the parts.
BASES = {
    "Aggregator", "Attack", "ClientAlgorithm", "ClientContext", "ClientSampler", "Cohort", "Collusion", "Compression",
    "MoreauSGD",
    "Personalized", "Personalizer", "Upload", "UploadContext", "UpdateFilter", "check_order",
    "sanitize_report", "upload", "with_guard",
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


@dealt([AGGREGATORS, PERSONALIZERS, SAMPLERS, ALGORITHMS, UPLOADS, FILTERS], IN_FITS)
def test_parts(check: PartCheck) -> None:
    check()


@pytest.mark.parametrize("room", [aggregation, attacks, algorithms, filters, personalization, sampling, uploads])
def test_all_parts_are_here(room: object) -> None:
    tables = (AGGREGATORS, PERSONALIZERS, SAMPLERS, ALGORITHMS, UPLOADS, FILTERS)
    known = {checks[0].case.name for table in tables for checks in table}
    assert set(room.__all__) <= known | BASES  # type: ignore[attr-defined]


def test_a_part_that_was_checked_keeps_its_short_name_on_command_lines() -> None:
    """Whose server's side is a class of its own while it is checked."""
    (check,) = (each for each in checks_of(ClientAlgorithmCase(FedProx(0.1))) if "sides_are_apart" in str(each))
    check()
    paths = get_all_subclass_paths(algorithms.ClientAlgorithm)
    assert [path for path in paths if path.endswith(".FedProx")] == ["flsv.clients.algorithms.FedProx"]
