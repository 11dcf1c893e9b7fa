"""What is computed from a private client's samples reaches no part of the server but in the noised update."""

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flsv import ClientEvaluation, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.configuration.federation_config import ROLES
from flsv.core import VOCABULARY, Client, LocalData
from flsv.core.needs import ReadRound
from flsv.engines.remote.federation import RemoteClient
from flsv.filters import SampleCap
from flsv.metrics.base import ContributionMetric
from flsv.personalization import Personalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.training.algorithms import FedProx
from flsv.training.algorithms.base import ClientContext
from flsv.utilities.errors import ConfigurationError
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

#: Types of arguments that only methods at a client receive. What they compute leaves it in the update alone.
AT_A_CLIENT = (LocalData, ClientContext)
OUR_MODULES = ("flsv.", __name__)
#: How far the spy follows public names from an argument.
DEPTH = 6


PRIVATE = (GaussianPrivacy(clip=1.0, noise_multiplier=1.0),)


class FromTheGlobalModel(Personalizer):
    def personalize(self, round, contributions, models):
        return {}


class OfTheWholeRound(ContributionMetric):
    per_class = False
    round_fields: ClassVar[dict[str, Any]] = {"round": lambda round: round}
    needs = ()

    def init_states(self, num_clients, num_classes):
        self.add_state("total", torch.zeros(num_clients), dist_reduce_fx="sum")

    def update(self, client_ids, round):
        self.total[client_ids] += 1

    def compute(self):
        return self.total


#: The class of a part by its role, and its arguments.
PARTS = {
    "aggregator": (FedAvg, {}),
    "personalizer": (FromTheGlobalModel, {}),
    "sampler": (UniformSampler, {"cohort_size": 3}),
    "client_algorithm": (FedProx, {"mu": 0.1}),
    "filters": (SampleCap, {"cap": 10}),
    "metrics": (OfTheWholeRound, {}),
}


class Spy:
    """Reader of everything that a part's methods receive, which looks for clients' numbers of samples per class."""

    def __init__(self, class_counts):
        self.secrets = [class_counts, *class_counts, *class_counts.T]
        self.called = set()
        self.declared = {}
        self.leaks = []

    def watching(self, kind):
        """Return a subclass that also reads what each of its public methods receives."""
        methods = {}
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            is_public = not name.startswith("_")
            if is_public and method.__module__.startswith(OUR_MODULES):
                methods[name] = self._spying(name, method)
        return type(f"Spying{kind.__name__}", (kind,), {**methods, **self.declared})

    def _spying(self, name, method):
        @functools.wraps(method)
        def spying(part, *args, **kwargs):
            self.called.add(name)
            arguments = [*args, *kwargs.values()]
            is_at_a_client = any(isinstance(argument, AT_A_CLIENT) for argument in arguments)

            if not is_at_a_client:
                self._read(arguments, name)
            return method(part, *args, **kwargs)

        return spying

    def _read(self, value, path):
        if isinstance(value, Tensor):
            if any(torch.equal(value.cpu(), secret) for secret in self.secrets):
                self.leaks.append(path)
        elif path.count("/") < DEPTH:
            for name, content in contents_of(value):
                self._read(content, f"{path}/{name}")


def contents_of(value):
    """Yield what can be reached from an argument by public names, and what clients answer."""
    if isinstance(value, Client):
        with suppress(ConfigurationError):
            yield "ask", value.ask(class_counts_of)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, ReadRound):
        for name in VOCABULARY:
            with suppress(AttributeError, ConfigurationError):
                yield name, getattr(value, name)
    elif is_dataclass(value):
        for field in fields(value):
            yield field.name, getattr(value, field.name)


def class_counts_of(local):
    return local.class_counts.clone()


def fit_watched(spy, folder, uploads=PRIVATE):
    """Fit a loop with a part of each kind, of which the spy reads all arguments."""
    loop_options = {}
    for role, (kind, arguments) in PARTS.items():
        watched_kind = spy.watching(kind)
        loop_options[role] = watched_kind(**arguments)

    # The loop takes several filters, and metrics by name.
    loop_options["filters"] = [loop_options["filters"]]
    loop_options["metrics"] = {"metric": loop_options["metrics"]}
    loop = FederatedLoop(
        **loop_options,
        uploads=uploads,
        evaluation=ClientEvaluation(every=1, models="trained"),
        seed=0,
    )
    fit(loop, folder, Plain(network(batch_norm=False)), toy_data(), rounds=2)


@pytest.fixture
def argument_spy():
    data = toy_data()
    data.setup("fit")
    return Spy(data.class_counts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:metrics")
def test_no_method_of_a_part_reads_the_class_counts_of_private_clients(argument_spy, tmp_path):
    fit_watched(argument_spy, tmp_path)

    assert argument_spy.leaks == []

    at_the_server = {"aggregate", "apply", "before_filters", "bind", "choose", "end_round"}
    at_the_server |= {"personalize", "send", "start", "update", "weights"}

    assert at_the_server <= argument_spy.called


def test_the_spy_reads_class_counts_where_clients_answer(argument_spy, tmp_path):
    argument_spy.declared = {"needs": ("clients", "all_clients")}

    fit_watched(argument_spy, tmp_path, uploads=())

    methods = {path.split("/")[0] for path in argument_spy.leaks}
    assert {"aggregate", "weights", "before_filters"} <= methods
    assert {"choose", "personalize", "update"} <= methods


def test_every_kind_of_part_is_watched():
    assert {*PARTS} == {*ROLES, "filters", "metrics"}


def test_no_kind_of_client_overrides_the_door():
    assert "ask" in vars(Client)
    assert "ask" not in vars(RemoteClient)


def test_a_private_client_answers_only_questions_that_return_nothing_by_their_type():
    class_counts = torch.tensor([1, 2])
    data = LocalData("client 0", lambda split: [], class_counts, class_counts)
    client = Client(0, data)
    client.is_private = True
    counts_at_client = []

    def look(local) -> None:
        counts_at_client.append(local.class_counts)
        return local.class_counts

    with refused("'class_counts_of'.*only its noised update"):
        client.ask(class_counts_of)
    with refused("'<lambda>'"):
        client.ask(lambda local: local.class_counts)

    assert client.ask(look) is None
    assert len(counts_at_client) == 1
