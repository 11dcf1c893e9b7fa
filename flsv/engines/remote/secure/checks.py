"""What cannot be done where the server sees sums of updates only: refused before training, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flsv.engines.remote.secure.payload import groups_of
from flsv.engines.remote.secure.settings import LEAST
from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter
from flsv.sampling import FullParticipation
from flsv.server import ContributionMetrics
from flsv.server.config import FederationConfig

_SENTENCE = "With secure sums the server sees no update by itself, and {0}. {1}"


def check_sums_only(config: FederationConfig, board: ContributionMetrics | None = None) -> None:
    """
    Args:
        config: of the federation.
        board: its metrics, as the server has them. None: not asked, as at a site.

    Raises:
        ConfigurationError: a part that looks at single updates, or that makes sites tell one.
    """
    for what, instead in _wrong(config, board):
        raise ConfigurationError(_SENTENCE.format(what, instead))


def by_samples(config: FederationConfig) -> bool:
    """Whether sites weigh as much as they have samples; else all weigh the same."""
    return getattr(config.aggregator, "weighting", "samples") == "samples"


def _wrong(config: FederationConfig, board: ContributionMetrics | None) -> Iterator[tuple[str, str]]:
    strategies: Mapping[str, Any] = config.strategies
    if (personalizer := strategies.get("personalizer")) is not None:
        yield (
            f"personalizer {personalizer!r} makes start points of single ones; all sites have to have one",
            "Leave it out, or keep a part of the model at the sites: share=['!head'].",
        )
    for role, instead in (
        ("aggregator", "Take FedAvg, FedAvgM, FedAdam or another ServerOptimizer."),
        (
            "client_algorithm",
            "Take FedProx, Ditto, PerFedAvg, FedRep or none; ShadowShapley(groups=...), of three clients or more each.",
        ),
        ("sampler", "Take UniformSampler or FullParticipation."),
    ):
        if role in strategies and not strategies[role].sums_only:
            yield f"{role} {strategies[role]!r} needs single ones, or what single clients report", instead
    yield from _wrong_groups(strategies)
    for each in config.filters:
        if type(each) is not OutlierFilter or each.exclude:
            yield f"filters {each!r} look at single ones", "Leave it out: clip=... bounds what one site can do."
    for upload in config.uploads:
        if not upload.sums_only:
            yield (
                f"uploads {upload!r} would save or change nothing that is masked",
                "Leave it out, or take GaussianPrivacy.",
            )
    if config.evaluation.every:
        yield (
            f"evaluation={config.evaluation!r} would have single sites tell an accuracy",
            "Leave it out: the global model is validated on the server's own data.",
        )
    for name, arguments in ({} if board is None else board.single_metrics).items():
        yield (
            f"the metric {name!r} ({type(board.metrics[name]).__name__}) asks for {', '.join(arguments)}",  # type: ignore[union-attr]
            "Take EverybodyElse, ShadowShapley(groups=...), or CommunicationCost.",
        )


def _wrong_groups(strategies: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    algorithm, sampler = strategies.get("client_algorithm"), strategies.get("sampler")
    members = None if algorithm is None else algorithm.row_members()
    if members is None:
        return
    small = [group for group in groups_of(members) if len(group) < LEAST]
    if small:
        yield (
            f"{algorithm!r} has sums over {small}: of a sum of two, each knows the other's part",
            f"Make each group {LEAST} clients or more.",
        )
    if not isinstance(sampler, FullParticipation):
        yield (
            f"sampler {sampler!r} draws cohorts in which too few of a group of {algorithm!r} may be",
            "Take FullParticipation.",
        )
