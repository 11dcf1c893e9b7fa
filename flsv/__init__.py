"""Federated learning on PyTorch Lightning in which every participant's contribution is measured while it happens."""

import importlib
from typing import TYPE_CHECKING, Any

from flsv.__about__ import __version__ as __version__

if TYPE_CHECKING:  # what __getattr__ finds, for type checkers
    from flsv.configuration.federation_config import ClientEvaluation
    from flsv.core import ClientUpdate, ParameterSpace, Round
    from flsv.data import FederatedDataModule
    from flsv.federation import FederatedLoop
    from flsv.functional.allocation import allocate
    from flsv.models.classifier import ClassifierClient
    from flsv.outside.value_round import value_round
    from flsv.report import read_run
    from flsv.results.folder import Reporting
    from flsv.retraining.retrain import retrain
    from flsv.utilities.errors import ConfigurationError

__all__ = [
    "ClassifierClient",
    "ClientEvaluation",
    "ClientUpdate",
    "ConfigurationError",
    "FederatedDataModule",
    "FederatedLoop",
    "ParameterSpace",
    "Reporting",
    "Round",
    "allocate",
    "read_run",
    "retrain",
    "value_round",
]

# Where the names above live. They are imported when they are first asked for: torch and Lightning take seconds, which
# whoever asks for the version or for help need not wait.
_HOMES = {
    "ClassifierClient": "flsv.models.classifier",
    "ClientEvaluation": "flsv.configuration.federation_config",
    "ClientUpdate": "flsv.core",
    "ConfigurationError": "flsv.utilities.errors",
    "FederatedDataModule": "flsv.data",
    "FederatedLoop": "flsv.federation",
    "ParameterSpace": "flsv.core.parameter_space",
    "Reporting": "flsv.results.folder",
    "Round": "flsv.core",
    "allocate": "flsv.functional.allocation",
    "read_run": "flsv.report",
    "retrain": "flsv.retraining.retrain",
    "value_round": "flsv.outside.value_round",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    # Modules are in lower case, and looking for one that is not there is slow: jsonargparse asks for all classes here.
    if not name.startswith("_") and name.islower():
        # `import flsv` is enough for flsv.metrics.ClassSpecificShapley.
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
