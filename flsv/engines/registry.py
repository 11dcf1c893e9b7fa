"""Engines by name, for the loop's option and for the Trainer's."""
# Not in __init__.py: a site's process for one message imports flsv.engines.flower_resident without Lightning.

from pkgutil import resolve_name
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

#: Where the engines are that ``FederatedLoop(engine=...)`` takes by name. One is imported when it is asked for.
ENGINES = {
    "sequential": "flsv.engines.engine:Engine",
    "vmap": "flsv.engines.vmap:VmapProcess",
}
#: Makes the coalition games of a run that scores models.
SCORING = "flsv.engines.scoring:ScoringOfARun"
#: Says by which measures models could be scored.
POSSIBLE_MEASURES = "flsv.engines.scoring:possible_measures"
#: Make the evaluators of one client.
EVALUATORS = "flsv.games.make_evaluators"


def _make_federated_strategy(**options: Any) -> Any:
    return resolve_name("flsv.engines.ranks:FederatedStrategy")(**options)


StrategyRegistry.register(
    "federated", _make_federated_strategy, "the clients of a federation on several processes"
)
