"""Every part of a federation that flsv has passes the checks of :mod:`flsv.testing`."""

import inspect
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from testing.part_cases import (
    MORE,
    FilterCase,
    PersonalizerCase,
    UploadCase,
    parametrize_checks,
    repr_is_code,
)

from flsv import aggregation, attacks, filters, personalization, sampling, uploads
from flsv.metrics import (
    ContributionEstimation,
    CosineGradientShapley,
    DomainRelevance,
)
from flsv.models.mixture import MixtureClient
from flsv.privacy import GaussianPrivacy
from flsv.testing.checks import PartCheck, checks_of
from flsv.testing.samplers import SamplerCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase
from flsv.training import algorithms

Checks = list[PartCheck]


def make_checks(kind, part, **options) -> Checks:
    case = kind(part, **options)
    if kind in (AggregatorCase, ClientAlgorithmCase):
        case.checks = (*kind.checks, *MORE)
    if kind is SamplerCase:
        case.checks = (*kind.checks, repr_is_code)
    return checks_of(case)


aggregator, personalizer, sampler = (
    partial(make_checks, AggregatorCase),
    partial(make_checks, PersonalizerCase),
    partial(make_checks, SamplerCase),
)
algorithm, upload, update_filter = (
    partial(make_checks, ClientAlgorithmCase),
    partial(make_checks, UploadCase),
    partial(make_checks, FilterCase),
)
AGGREGATORS = [
    aggregator(aggregation.Bucketing(aggregation.GeometricMedian())),
    aggregator(aggregation.CGSV("cgsv"), metrics={"cgsv": CosineGradientShapley()}),
    aggregator(
        aggregation.DivergenceWeighted(),
        expected_failures={"remote_is_equal": "a site knows no class counts of the others"},
    ),
    aggregator(aggregation.FedAdam()),
    aggregator(aggregation.FedAvg("uniform", server_lr=0.5)),
    aggregator(aggregation.FedAvg()),
    aggregator(aggregation.FedCE(), metrics={"fedce": ContributionEstimation()}),
    aggregator(algorithms.FedDynServer(), client_algorithm=algorithms.FedDyn()),
    aggregator(
        aggregation.FedNova(),
        expected_failures={"remote_is_equal": "a site could state another number of steps"},
    ),
    aggregator(aggregation.FedYogi()),
    aggregator(aggregation.ServerOptimizer(partial(torch.optim.Adam, lr=0.02, amsgrad=True))),
    aggregator(aggregation.ShapFedWA("cssv")),
    aggregator(aggregation.ShapleySoftmax()),
    aggregator(
        aggregation.TrimmedMean(trim=0.34),
        expected_failures={"equal_clients_weigh_the_same": "of equal entries it keeps some"},
    ),
]
PERSONALIZERS = [
    personalizer(
        personalization.FedEM(),
        module=partial(MixtureClient, 2, network="softmax", num_classes=3, input_shape=(4,)),
    ),
    personalizer(personalization.IFCA(2)),
    personalizer(personalization.PFedHN(hidden=4)),
    personalizer(personalization.PFedSV(), metrics={"relevance": DomainRelevance()}),
    personalizer(personalization.SparsifiedReward(), metrics={"cgsv": CosineGradientShapley()}),
]
SAMPLERS = [
    sampler(sampling.BernoulliSampler(2.0)),
    sampler(sampling.FixedCohort([0, 2])),
    sampler(sampling.PowerOfChoice(2, candidates=3)),
    sampler(sampling.ShapleyImportanceSampler(2.0)),
    sampler(sampling.SoftmaxSampler(2)),
    sampler(sampling.UniformSampler(2)),
]
ALGORITHMS = [
    algorithm(algorithms.FedDyn(), aggregator=algorithms.FedDynServer()),
    algorithm(algorithms.FedRep(), share=["!head"], local_epochs=2),
    algorithm(algorithms.PerFedAvg(hessian="free")),
]
UPLOADS = [
    upload(part)
    for part in (
        attacks.Alignment(clients=[1]),
        attacks.FalseReports(loss=1.0, clients=[1]),
        attacks.FreeRider(clients=[1]),
        GaussianPrivacy(1.0, 0.5),
        attacks.GradientPoisoning(clients=[1]),
        attacks.Scaling(2.0, clients=[1]),
        attacks.SignFlip(clients=[1]),
        uploads.TopK(0.3),
    )
]
UPLOADS += [
    upload(
        attacks.InnerProductManipulation(clients=[0, 2]),
        expected_failures={"remote_is_equal": "sites do not see each other's updates"},
    )
]
FILTERS = [
    update_filter(filters.MultiKrum(byzantine=0, keep=2), sampler=sampling.FullParticipation()),
    update_filter(filters.NormCap(1.25)),
    update_filter(filters.OutlierFilter(exclude=True)),
    update_filter(filters.SampleCap(1.25)),
]
#: That train federations, or ask a part for many rounds.
SHARED = (
    *("gives_a_cohort", "draws_a_cohort"),
    *("remote_is_equal", "vmap_is_equal", "resumes", "odd_rounds_end"),
    *("equal_clients_weigh_the_same", "learns", "attack_moves_little"),
    *("starts_are_models", "trains_alone"),
)


class PartTable(NamedTuple):
    """The parts of a package: their base class, how their checks are made, and a row of checks for each part.

    An exported part that needs no arguments needs no row.
    """

    package: ModuleType
    base: type
    make_checks: partial[Checks]
    rows: Sequence[Checks]


TABLES = (
    PartTable(aggregation, aggregation.Aggregator, aggregator, AGGREGATORS),
    PartTable(personalization, personalization.Personalizer, personalizer, PERSONALIZERS),
    PartTable(sampling, sampling.ClientSampler, sampler, SAMPLERS),
    PartTable(algorithms, algorithms.ClientAlgorithm, algorithm, ALGORITHMS),
    PartTable(attacks, uploads.Upload, upload, UPLOADS),
    PartTable(uploads, uploads.Upload, upload, UPLOADS),
    PartTable(filters, filters.UpdateFilter, update_filter, FILTERS),
)


def unlisted_parts(table: PartTable) -> list[type]:
    """The parts that a package exports and that have no row, without base classes."""
    listed = {checks[0].case.name for checks in table.rows}
    parts = []
    for name in table.package.__all__:
        exported = getattr(table.package, name)
        is_part = inspect.isclass(exported) and issubclass(exported, table.base)
        if not is_part or name in listed:
            continue
        if not inspect.isabstract(exported) and exported is not table.base:
            parts.append(exported)
    return parts


def needs_arguments(kind: type) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    return any(parameter.default is parameter.empty for parameter in parameters)


def checks_of_unlisted_parts() -> list[Checks]:
    """Return the checks of parts that are made without arguments."""
    rows = []
    for table in TABLES:
        for kind in unlisted_parts(table):
            if not needs_arguments(kind):
                rows.append(table.make_checks(kind()))

    return rows


PARTS = [
    AGGREGATORS,
    PERSONALIZERS,
    SAMPLERS,
    ALGORITHMS,
    UPLOADS,
    FILTERS,
    checks_of_unlisted_parts(),
]


@pytest.mark.by_turn
@parametrize_checks(PARTS, SHARED)
def test_every_federation_component_passes_the_checks_for_its_kind(check):
    check()


def test_every_exported_part_is_checked():
    checked_names = {checks[0].case.name for rows in PARTS for checks in rows}
    for table in TABLES:
        for kind in unlisted_parts(table):
            (case_class,) = table.make_checks.args
            row = f"{case_class.__name__}: {kind.__name__}(...)"
            assert kind.__name__ in checked_names, f"{__file__}: add to its tables a row of a {row}"
