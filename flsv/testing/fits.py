"""Tiny fits: three rounds of four clients with 32 samples, resumed, with vmap, and with sites behind a wire."""

from __future__ import annotations

import copy
import json
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, Site, agreement
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.report.folder import Reporting
from flsv.sampling import ClientSampler
from flsv.seeding import generator_for, isolated_rngs
from flsv.strategy import Contributions
from flsv.testing.checks import Case, expect, same

NUM_CLIENTS, NUM_CLASSES, FEATURES, VALIDATION = 4, 3, 4, 12
SIZES = (8, 6, 8, 10)
#: Client 3 never takes part.
COHORTS = ((0, 2), (0, 1, 2), (1, 2))
#: Another number for everybody.
ORDER = (2, 0, 3, 1)
SEED, ROUNDS = 1, len(COHORTS)
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class TinyClassifier(L.LightningModule):
    """A classifier of two layers with plain SGD, always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, NUM_CLASSES))
        draw = generator_for(0, "weights")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Turns(ClientSampler):
    """The cohorts of a list, one after the other.

    Args:
        cohorts: client ids of each.
    """

    def __init__(self, cohorts: Sequence[Sequence[int]]) -> None:
        self.cohorts = [sorted(cohort) for cohort in cohorts]

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.tensor(self.cohorts[round_index % len(self.cohorts)])

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.zeros(num_clients)
        chances[self.cohorts[round_index % len(self.cohorts)]] = 1
        return chances


class StandIn(ContributionMetric):
    """In place of the metric that a strategy reads: the clients' shares of samples, the same for every column.

    Args:
        shape: of the values, as strategies say it: ``("n",)``, ``("n", "M")`` or ``("n", "n")``.
    """

    per_class = False
    samples: Tensor

    def __init__(self, shape: Sequence[str] = ("n",), num_clients: int | None = None) -> None:
        self.shape = tuple(shape)
        super().__init__(num_clients)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("samples", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids: Tensor, num_samples: Tensor) -> None:
        self.samples[client_ids] = num_samples.to(self.samples)

    def compute(self) -> Tensor:
        shares = self.samples / self.samples.nansum()
        columns = {1: 0, "M": NUM_CLASSES, "n": len(shares)}[self.shape[1] if len(self.shape) > 1 else 1]
        return shares[:, None].repeat(1, columns) if columns else shares


def samples_of(client: int, alike: bool = False) -> tuple[Tensor, Tensor]:
    """A client's samples x ``[m, 4]`` and classes ``[m]``; number -1 is the server.

    Args:
        client: its number.
        alike: whether all of them are the same, so that it does not matter which are held out, nor their order.
    """
    size = VALIDATION if client < 0 else SIZES[client]
    y = torch.arange(size) % NUM_CLASSES
    if alike and client >= 0:
        y = torch.full_like(y, client % NUM_CLASSES)
    x = torch.randn(size, FEATURES, generator=generator_for(0, "samples", client)) + client / 4
    x[torch.arange(size), y] += 2
    return x[:1].repeat(size, 1) if alike and client >= 0 else x, y


def tiny_data(order: Sequence[int] = range(NUM_CLIENTS), alike: bool = False) -> FederatedDataModule:
    """Four clients with validation and test samples of their own, and the server's validation set.

    Args:
        order: the number that each client goes by.
        alike: see :func:`samples_of`.
    """
    clients = {f"site {place}": samples_of(list(order).index(place), alike) for place in range(NUM_CLIENTS)}
    return FederatedDataModule(clients=clients, val=samples_of(-1), batch_size=4, splits=_SPLITS)


_SPLITS = Splits(client_val=0.25, client_test=0.125)


@dataclass
class Fit:
    """What has come of a fit.

    Args:
        loop: after it.
        models: ``[P]``, the global model after each round.
        contributions: the metrics' values after each round.
        checkpoint: after the second round, if it was asked for.
    """

    loop: FederatedLoop
    models: list[Tensor] = field(default_factory=list)
    contributions: list[dict[str, Tensor]] = field(default_factory=list)
    checkpoint: Path | None = None

    def results(self) -> dict[str, Any]:
        """All that the rounds have left."""
        state = self.loop.state_dict()
        found: dict[str, Any] = {"model": self.models[-1], "contributions": dict(self.loop.contributions)}
        for name in ("starts", "clients", "trained", "strategies", "weights"):
            found[name] = state.get(name)
        return {**found, "metrics": {name: metric.state_dict() for name, metric in self.loop.metrics.items()}}


class _Watch(L.Callback):
    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.fit.models.append(self.fit.loop.state.model().clone())
        self.fit.contributions.append({name: value.clone() for name, value in self.fit.loop.contributions.items()})
        if self.fit.checkpoint is not None and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.fit.checkpoint)


class FitCase(Case):
    """A part that takes part in a fit.

    Args:
        part: see :class:`flsv.testing.checks.Case`.
        expected_failures: likewise.
        module: makes the module that is trained; by default a linear classifier with plain SGD.
        questions: functions that clients at sites may be asked for, as ``"package.module:function"``.
        loop: other arguments of the :class:`flsv.FederatedLoop`.
    """

    role: str
    #: Whether a loop takes it.
    in_a_loop = True
    #: Whether it has to do with clients, and not only with what the server has of a round, whoever ran that.
    sees_clients = True
    #: What its parts are subclasses of.
    base: type

    def __init__(
        self,
        part: Any,
        *,
        expected_failures: Mapping[str, str] | None = None,
        module: Callable[[], L.LightningModule] = TinyClassifier,
        questions: Sequence[str] = (),
        **loop: Any,
    ) -> None:
        self._module, self.questions, self.loop = module, questions, loop
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
        """A loop with a fresh part in it."""
        arguments: dict[str, Any] = {"sampler": Turns(cohorts), "filters": [], "seed": SEED}
        arguments |= copy.deepcopy({**self.loop, **self.placed(self.part)})
        arguments |= {"reporting": Reporting(table=False, files=False), **changes}
        metrics = dict(arguments.get("metrics") or {})
        for each in arguments.values():
            name = getattr(each, "metric", None)
            if isinstance(name, str) and name not in metrics:
                metrics[name] = StandIn(each.metric_shape or ("n",))
        return FederatedLoop(**{**arguments, "metrics": metrics})

    def fit(
        self,
        loop: FederatedLoop,
        rounds: int = ROUNDS,
        data: FederatedDataModule | None = None,
        checkpoint: Path | None = None,
        start: Path | None = None,
    ) -> Fit:
        """Three rounds, or as many as are said; from a checkpoint, if there is one."""
        found = Fit(loop, checkpoint=checkpoint)
        trainer = L.Trainer(max_epochs=rounds, callbacks=[loop, _Watch(found)], **_QUIET)
        trainer.fit(self.module(), tiny_data() if data is None else data, ckpt_path=start)
        return found

    @cached_property
    def folder(self) -> Path:
        """For checkpoints and for what sites keep; it goes with the case."""
        self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    @cached_property
    def uninterrupted(self) -> Fit:
        """The fit that others are compared with."""
        return self.fit(self.make(), checkpoint=self.folder / "two.ckpt")

    def refused(self, loop: Callable[[], FederatedLoop], fit: Callable[[FederatedLoop], Fit]) -> Fit | None:
        """The fit, or None where it is refused before the first round."""
        made: list[FederatedLoop] = []
        try:
            made.append(loop())
            return fit(made[0])
        except ConfigurationError as error:
            rounds = made[0].round_index if made else 0
            expect(
                rounds == 0,
                f"what cannot be done to be refused before the first round; it was after {rounds}: {error}",
                "Check in begin(federation).",
            )
            return None


def resumes_in_a_fit(case: FitCase) -> None:
    """A fit that is stopped after two of three rounds and resumed ends as if it had not been, to the bit."""
    if case.in_a_loop:
        whole = case.uninterrupted
        resumed = case.fit(case.make(), start=whole.checkpoint)
        expect_same(resumed.results(), whole.results(), None, "a resumed fit", "Return it from state_dict.")


def vmap_is_equal(case: FitCase) -> None:
    """With ``engine="vmap"`` two rounds end alike to rounding, or are refused before the first."""
    if not case.sees_clients:
        return
    found = case.refused(lambda: case.make(engine="vmap"), lambda loop: case.fit(loop, 2))
    if found is not None:
        mine, theirs = (
            {"models": each.models[:2], "contributions": each.contributions[:2]} for each in (found, case.uninterrupted)
        )
        expect_same(mine, theirs, 1e-3, 'engine="vmap"', "Refuse what cannot be batched in begin(federation).")


def remote_is_equal(case: FitCase) -> None:
    """With the clients at sites, from which nothing but messages comes, the first round ends alike, or is refused."""
    if not case.sees_clients:
        return
    found = case.refused(case.make, partial(_remotely, case))
    if found is not None:
        local = case.uninterrupted
        expect_same(
            {"model": found.models[0], "contributions": found.contributions[0]},
            {"model": local.models[0], "contributions": local.contributions[0]},
            1e-5,
            "a round with the clients at sites",
            "Say what crosses in sends and reports, and ask clients with client.ask(function) of a module.",
        )


def clients_permuted_in_a_fit(case: FitCase) -> None:
    """Clients with other numbers end with the same models."""
    one = case.fit(case.make(), 2, tiny_data(alike=True)).results()
    cohorts = [[ORDER[client] for client in cohort] for cohort in COHORTS]
    other = case.fit(case.make(cohorts), 2, tiny_data(ORDER, alike=True)).results()
    back = {client: other["starts"][ORDER[client]] for client in range(NUM_CLIENTS) if ORDER[client] in other["starts"]}
    mine = {"model": one["model"], "starts": dict(sorted(one["starts"].items())), "weights": one["weights"]}
    theirs = {"model": other["model"], "starts": back, "weights": other["weights"][list(ORDER)]}
    expect_same(theirs, mine, 1e-4, "a fit with other numbers for the clients", "Index by client_ids.")


def expect_same(mine: Mapping[str, Any], theirs: Mapping[str, Any], rtol: float | None, what: str, advice: str) -> None:
    differ = [name for name in theirs if not same(mine.get(name), theirs[name], rtol)]
    how = "to the bit" if rtol is None else f"within {rtol:g}"
    expect(
        not differ,
        f"{what} to end as the fit in one process does, {how}; {differ} differ: "
        f"{reprlib.repr([mine.get(name) for name in differ])} and {reprlib.repr([theirs[name] for name in differ])}",
        advice,
    )


class _Wire:
    """Sites in this process, whose packets go through JSON and copies: nothing but what could cross does."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self._sites = sites

    def present(self) -> dict[int, str]:
        return {address: f"site {address}" for address in self._sites}

    def exchange(self, packets: Mapping[int, Packet], seconds: float, start: float = 0.0) -> dict[int, Packet]:
        return {address: _through(self._sites[address].answer(_through(each))) for address, each in packets.items()}


def _through(packet: Packet) -> Packet:
    tensors = {name: tensor.clone() for name, tensor in packet.tensors.items()}
    return Packet(packet.kind, json.loads(json.dumps(packet.plain)), tensors)


class _ServerData(L.LightningDataModule):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples_of(-1)), batch_size=VALIDATION)


def _site_data(client: int) -> FederatedDataModule:
    return FederatedDataModule(samples_of(client), OneClient(), batch_size=4, splits=_SITE_SPLITS)


_SITE_SPLITS = Splits(server_val=0.0, client_val=0.25, client_test=0.125)


def _remotely(case: FitCase, loop: FederatedLoop) -> Fit:
    """One round with every client at a site."""
    names = [f"site {client}" for client in range(NUM_CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        sites = {
            client: Site(
                case.module,
                partial(_site_data, client),
                case.make,
                Path(folder) / name,
                trainer={"accelerator": "cpu"},
                questions=case.questions,
                upload_seed=SEED,
            )
            for client, name in enumerate(names)
        }
        ours = agreement(case.module(), loop)
        directory = Directory(_Wire(sites), names, ours, Path(folder) / "book.json", timeout=1, wait=0.2)
        directory.gather()
        sizes = [directory.sizes[client] for client in range(NUM_CLIENTS)]
        data = RemoteData(names, sizes, NUM_CLASSES, own=_ServerData())
        return case.fit(loop.replace(engine=partial(RemoteFederation, directory)), 1, data)
