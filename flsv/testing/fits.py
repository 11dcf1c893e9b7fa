"""Tiny fits: three rounds of four clients with 32 samples, resumed, and with vmap; and the checks of aggregators and
client algorithms in them."""

from __future__ import annotations

import copy
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv.aggregation import Aggregator
from flsv.configuration.federation_config import ClientEvaluation
from flsv.data import FederatedDataModule, Splits
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, PartialFederatedShapley
from flsv.models.classifier import ClassifierClient
from flsv.results.folder import Reporting
from flsv.sampling import ClientSampler
from flsv.testing.checks import Case, expect, is_one, pickles, same, saved
from flsv.training.algorithms import ClientAlgorithm
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for, isolated_rngs

NUM_CLIENTS, NUM_CLASSES, FEATURES, VALIDATION = 4, 3, 4, 12
SIZES = (8, 6, 8, 10)
#: Client 3 never takes part.
COHORTS = ((0, 2), (0, 1, 2), (1, 2))
#: Another number for everybody.
ORDER = (2, 0, 3, 1)
SEED, ROUNDS = 1, len(COHORTS)
_SPLITS = Splits(client_val=0.25, client_test=0.125)
_QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class TinyClassifier(ClassifierClient):
    """A classifier of two layers with plain SGD."""

    def __init__(self) -> None:
        network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, NUM_CLASSES))
        super().__init__(network, num_classes=NUM_CLASSES, optimizer=partial(torch.optim.SGD, lr=0.1))


class Turns(ClientSampler):
    """The cohorts of a list, one after the other.

    Args:
        cohorts: client ids of each.
    """

    def __init__(self, cohorts: Sequence[Sequence[int]]) -> None:
        self.cohorts = [sorted(cohort) for cohort in cohorts]

    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> Tensor:
        return torch.tensor(self.cohorts[round_index % len(self.cohorts)])

    def inclusion_probabilities(self, num_clients: int, contributions: Any, round_index: int = 0) -> Tensor:
        cohort = self.cohorts[round_index % len(self.cohorts)]
        return torch.zeros(num_clients).index_fill(0, torch.tensor(cohort), 1)


def samples_of(client: int, alike: bool = False) -> tuple[Tensor, Tensor]:
    """A client's samples x ``[m, 4]`` and classes ``[m]``; number -1 is the server.

    Args:
        client: its number.
        alike: whether all of them are the same, so that it does not matter which are held out, nor their order.
    """
    size = VALIDATION if client < 0 else SIZES[client]
    y = (torch.arange(size) + max(client, 0)) % NUM_CLASSES
    x = torch.randn(size, FEATURES, generator=generator_for(0, "samples", client)) + client / 4
    x[torch.arange(size), y] += 2
    return (x[:1].repeat(size, 1), y[:1].repeat(size)) if alike and client >= 0 else (x, y)


def tiny_data(order: Sequence[int] = range(NUM_CLIENTS), alike: bool = False) -> FederatedDataModule:
    """Four clients with validation and test samples of their own, and the server's validation set.

    Args:
        order: the number that each client goes by.
        alike: see :func:`samples_of`.
    """
    clients = {f"site {place}": samples_of(list(order).index(place), alike) for place in range(NUM_CLIENTS)}
    return FederatedDataModule(clients=clients, val=samples_of(-1), batch_size=4, splits=_SPLITS)


class Fit(L.Callback):
    """What has come of a fit.

    Args:
        loop: after it.
        checkpoint: where it is saved after the second round, if anywhere.

    Attributes:
        models: ``[P]``, the global model after each round.
        contributions: the metrics' values after each round.
    """

    def __init__(self, loop: FederatedLoop, checkpoint: Path | None = None) -> None:
        self.loop, self.checkpoint = loop, checkpoint
        self.models: list[Tensor] = []
        self.contributions: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.models.append(self.loop.state.model().clone())
        values = self.loop.contribution_metrics.contributions
        self.contributions.append({name: value.clone() for name, value in values.items()})
        if self.checkpoint is not None and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.checkpoint)

    def results(self) -> dict[str, Any]:
        """All that the rounds have left."""
        state = self.loop.state_dict()
        names = ("starts", "clients", "trained", "strategies", "weights")
        metrics = {name: metric.state_dict() for name, metric in self.loop.metrics.items()}
        values = dict(self.loop.contribution_metrics.contributions)
        left = {"model": self.models[-1], "contributions": values, "metrics": metrics}
        return left | {name: state.get(name) for name in names}


class FitCase(Case):
    """A part that takes part in a fit.

    Args:
        part: see :class:`flsv.testing.checks.Case`.
        expected_failures: likewise.
        module: makes the module that is trained; by default a classifier of two layers with plain SGD.
        loop: other arguments of the :class:`flsv.FederatedLoop`.
    """

    #: Its argument of a loop, and what its parts are subclasses of.
    role: str
    base: type
    #: Whether a loop takes it.
    in_a_loop = True
    #: Whether it has to do with clients, and not only with what the server has of a round, whoever ran that.
    sees_clients = True

    def __init__(
        self,
        part: Any,
        *,
        expected_failures: Mapping[str, str] | None = None,
        module: Callable[[], L.LightningModule] = TinyClassifier,
        **loop: Any,
    ) -> None:
        self._module, self.loop = module, loop
        super().__init__(part, expected_failures)

    def module(self) -> L.LightningModule:
        """What is trained, always the same."""
        with isolated_rngs(0, "module"):
            return self._module()

    def placed(self, part: Any) -> dict[str, Any]:
        """The arguments of a loop by which the part takes part in it."""
        return {self.role: part}

    def taken(self, loop: FederatedLoop) -> Any:
        """The part as a loop has it."""
        return getattr(loop, self.role)

    def make(self, cohorts: Sequence[Sequence[int]] = COHORTS, **changes: Any) -> FederatedLoop:
        """A loop with a fresh part in it, and metrics in the place of those that parts read by name."""
        arguments: dict[str, Any] = {"sampler": Turns(cohorts), "filters": [], "seed": SEED}
        arguments |= copy.deepcopy({**self.loop, **self.placed(self.part)})
        arguments |= {"reporting": Reporting(table=False, files=False), **changes}
        metrics = dict(arguments.get("metrics") or {})
        for each in arguments.values():
            name = getattr(each, "metric", None)
            if isinstance(name, str) and name not in metrics:
                metrics[name] = (
                    ClassSpecificShapley() if "M" in (each.metric_shape or ()) else PartialFederatedShapley()
                )
        return FederatedLoop(**{**arguments, "metrics": metrics})

    def fit(
        self,
        loop: FederatedLoop,
        rounds: int = ROUNDS,
        data: Any = None,
        checkpoint: Path | None = None,
        start: Path | None = None,
    ) -> Fit:
        """Three rounds, or as many as are said; from a checkpoint, if there is one."""
        fit = Fit(loop, checkpoint)
        options: dict[str, Any] = dict.fromkeys(_QUIET, False)
        trainer = L.Trainer(
            max_epochs=rounds, callbacks=[loop, fit], accelerator="cpu", num_sanity_val_steps=0, **options
        )
        trainer.fit(self.module(), tiny_data() if data is None else data, ckpt_path=start)
        return fit

    @cached_property
    def folder(self) -> Path:
        """For checkpoints; it goes with the case."""
        self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    @cached_property
    def uninterrupted(self) -> Fit:
        """The fit that others are compared with."""
        return self.fit(self.make(), checkpoint=self.folder / "two.ckpt")

    def expect_the_same(self, fit: Callable[[FederatedLoop], Fit], rounds: int, rtol: float, **changes: Any) -> None:
        """Raise unless the first rounds of another kind of fit end alike, or it is refused before the first."""
        loop = None
        try:
            loop = self.make(**changes)
            other = fit(loop)
        except ConfigurationError as error:
            done = loop.round_index if loop is not None else 0
            expect(done == 0, f"a refusal after {done} rounds: {error}")
            return
        mine, theirs = (
            {"models": each.models[:rounds], "contributions": each.contributions[:rounds]}
            for each in (other, self.uninterrupted)
        )
        expect_same(mine, theirs, rtol)


def resumes_in_a_fit(case: FitCase) -> None:
    """A fit that is stopped after two of three rounds and resumed ends as if it had not been, to the bit: return what
    the next round needs from state_dict."""
    if case.in_a_loop:
        whole = case.uninterrupted
        expect_same(case.fit(case.make(), start=whole.checkpoint).results(), whole.results())


def vmap_is_equal(case: FitCase) -> None:
    """With engine="vmap" two rounds end as in one process, to rounding, or are refused before the first: refuse what
    cannot be batched in begin(federation)."""
    if case.sees_clients:
        case.expect_the_same(lambda loop: case.fit(loop, 2), rounds=2, rtol=1e-3, engine="vmap")


def clients_permuted_in_a_fit(case: FitCase) -> None:
    """Clients with other numbers end with the same models and weights: index by client_ids."""
    one = case.fit(case.make(), 2, tiny_data(alike=True)).results()
    cohorts = [[ORDER[client] for client in cohort] for cohort in COHORTS]
    other = case.fit(case.make(cohorts), 2, tiny_data(ORDER, alike=True)).results()
    back = {client: other["starts"][ORDER[client]] for client in range(NUM_CLIENTS) if ORDER[client] in other["starts"]}
    mine = {"model": one["model"], "starts": dict(sorted(one["starts"].items())), "weights": one["weights"]}
    theirs = {"model": other["model"], "starts": back, "weights": other["weights"][list(ORDER)]}
    expect_same(theirs, mine, 1e-4)


def state_is_saved(case: FitCase) -> None:
    """What a part keeps between rounds comes back from a checkpoint as it was: a state_dict of tensors, numbers,
    strings, lists and dicts."""
    state = case.taken(case.uninterrupted.loop).state_dict()
    back = saved(state)
    expect(same(back, state), f"{back} of {state}")


def expect_same(mine: Mapping[str, Any], theirs: Mapping[str, Any], rtol: float | None = None) -> None:
    """Raise unless everything of two mappings is the same, to the bit or to ``rtol``."""
    differ = [name for name in theirs if not same(mine.get(name), theirs[name], rtol)]
    got, instead = (reprlib.repr([each.get(name) for name in differ]) for each in (mine, theirs))
    expect(not differ, f"other {', '.join(differ)}: {got} instead of {instead}")


class AggregatorCase(FitCase):
    """An aggregator."""

    role = "aggregator"
    base = Aggregator


class ClientAlgorithmCase(FitCase):
    """A client algorithm."""

    role = "client_algorithm"
    base = ClientAlgorithm


def weights_are_given(case: AggregatorCase) -> None:
    """Each row of round.client_ids has a finite weight, and the next model is finite: a client without a contribution
    has NaN there, so say what that counts as."""
    loop = case.make()
    aggregator: Any = loop.aggregator
    aggregate = aggregator.aggregate

    def watched(round: Any, contributions: Any) -> Any:
        vector, weights = aggregate(round, contributions)
        expect(weights.shape == (len(round),) and weights.isfinite().all(), f"weights {weights.tolist()}")
        expect(vector.isfinite().all(), f"a model with {int((~vector.isfinite()).sum())} entries that are not finite")
        return vector, weights

    aggregator.aggregate = watched
    case.fit(loop)


def trains_alone(case: ClientAlgorithmCase) -> None:
    """What a client trains does not depend on who has trained before it: keep what belongs to a client in
    context.state, and undo in leave_client what was changed in the module."""
    last = COHORTS[0][-1]
    keep = {"evaluation": ClientEvaluation(keep_trained=True)}
    alone, together = (case.fit(case.make([who], **keep), 1).loop.trained[last] for who in ([last], COHORTS[0]))
    expect(same(alone, together), f"{together.tolist()} after others and {alone.tolist()} alone")


def reports_are_declared(case: ClientAlgorithmCase) -> None:
    """What crosses beside the model is declared by names, each once, in sends and reports, tuples of the class."""
    names = [*case.part.sends, *case.part.reports]
    expect(all(names) and len(set(names)) == len(names), names)


#: What a part does at a client; the rest is the server's.
_CLIENT_SIDE = (
    "report", "receive", "own", "keep", "begin_client", "begin_batch", "frozen_parameters", "gradients",
    "leave_client", "end_client",
)  # fmt: skip


def sides_are_apart(case: FitCase) -> None:
    """A fit ends alike, to the bit, in which the part is one object at the clients and another at the server, as on
    ranks and with clients at sites: what crosses is declared in sends and reports, what a client keeps goes into its
    state."""
    kind: Any = type(case.part)
    own = [n for n in _CLIENT_SIDE if hasattr(case.base, n) and getattr(kind, n) != getattr(case.base, n)]
    if not own:
        return
    server, client = (case.taken(case.make()) for _ in range(2))
    sides = {name: partialmethod(_at_client, getattr(client, name)) for name in own}
    # With a name as of a local class, which command lines do not take for one of the same short name.
    named = {"__module__": kind.__module__, "__qualname__": f"sides_are_apart.<locals>.{kind.__name__}"}
    server.__class__ = type(kind.__name__, (kind,), {**sides, **named})
    apart = case.fit(case.make(**{case.role: server}))
    expect_same(apart.results(), case.uninterrupted.results())


def _at_client(server: Any, method: Any, *args: Any) -> Any:
    return method(*args)


IN_A_FIT = (
    sides_are_apart, clients_permuted_in_a_fit, state_is_saved, resumes_in_a_fit, vmap_is_equal,
)  # fmt: skip
AggregatorCase.checks = (is_one, pickles, weights_are_given, *IN_A_FIT)
ClientAlgorithmCase.checks = (is_one, pickles, reports_are_declared, trains_alone, *IN_A_FIT)
