from . import (
    aggregation as aggregation,
    attacks as attacks,
    cli as cli,
    contrib as contrib,
    core as core,
    data as data,
    engines as engines,
    federation as federation,
    filters as filters,
    functional as functional,
    games as games,
    metrics as metrics,
    models as models,
    outside as outside,
    payment as payment,
    personalization as personalization,
    privacy as privacy,
    results as results,
    retraining as retraining,
    sampling as sampling,
    scores as scores,
    server as server,
    sites as sites,
    tables as tables,
    testing as testing,
    training as training,
    uploads as uploads,
    utilities as utilities,
    valuation as valuation,
    vmap as vmap,
)
from .__about__ import __version__ as __version__
from .configuration.federation_config import (
    ClientEvaluation as ClientEvaluation,
    Reporting as Reporting,
)
from .core import ClientUpdate as ClientUpdate, ParameterSpace as ParameterSpace, Round as Round
from .data import FederatedDataModule as FederatedDataModule
from .federation import FederatedLoop as FederatedLoop
from .models.classifier import ClassifierClient as ClassifierClient
from .outside.value_round import value_round as value_round
from .payment.allocation import allocate as allocate
from .results import read_run as read_run
from .retraining.retrain import retrain as retrain
from .utilities.errors import ConfigurationError as ConfigurationError
from .utilities.one_lightning import import_as_lightning as import_as_lightning
