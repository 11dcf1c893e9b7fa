"""What cannot be done where the server sees sums of updates only: refused before training, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter
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
        ("client_algorithm", "Take FedProx, Ditto, PerFedAvg, FedRep or none."),
        ("sampler", "Take UniformSampler or FullParticipation."),
    ):
        if role in strategies and not strategies[role].sums_only:
            yield f"{role} {strategies[role]!r} needs single ones, or what single clients report", instead
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
            "Take EverybodyElse, or CommunicationCost.",
        )
