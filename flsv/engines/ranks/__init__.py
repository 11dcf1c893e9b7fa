"""Training of a cohort's clients on several processes (ranks), see ``docs/scaling.md``."""

from flsv.engines.ranks.group import ranks_of_environment, started_by_script
from flsv.engines.ranks.several_ranks import SeveralRanks, check_agreement
from flsv.engines.ranks.strategy import FederatedStrategy, agree, ranks_of

__all__ = [
    "FederatedStrategy",
    "SeveralRanks",
    "agree",
    "check_agreement",
    "ranks_of",
    "ranks_of_environment",
    "started_by_script",
]
