"""The price of training coalitions, and the choice of those that a run trains.

A price is a number of runs of the whole federation. It is counted and not timed, so that a run chooses the same
coalitions, and so has the same values, on every machine. The counts are numbers of steps, rows, elements and
multiplications. The constants are rough, and ``python tools/costs.py at-once`` measures some cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, comb
from typing import Any, NamedTuple

from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.data import FederatedDataModule
from flsv.functional.shapley.few_coalitions import Which, sizes_of_design
from flsv.metrics.coalitions.design import (
    Coalitions,
    coalition_masks,
    equivalent_runs,
    num_valued_rounds,
    with_any_halves,
)
from flsv.retraining.measured_run import MeasuredRun
from flsv.sampling import ClientSampler
from flsv.values.coalition_files import Outputs

# All constants are relative to the time of Lightning's own work for a step of one small model.
#: Multiplications and additions, in millions, that take as long: of one model, and of rows.
MEGAFLOPS_OF_STEP = 15.0
MEGAFLOPS_OF_ROWS = 35.0
#: A step of rows, and each row in it, besides its multiplications.
STEP_OF_ROWS = 1.3
ROW = 0.004
#: Numbers of a model, in millions, that an optimizer or the server's average handles in that time.
MILLIONS_OF_ELEMENTS = 2.0
#: The beginning and end of a client's training in a round.
VISIT = 0.5
#: The set-up of a fit that trains coalitions at once, and of the witnesses' fits.
SETUP = 150.0
#: The scoring of a model by its outputs, and each validation batch in it, besides its multiplications.
SCORED_MODEL = 0.3
SCORED_BATCH = 0.002
#: The scoring of a model by a Trainer's validation.
VALIDATION = 20.0
#: The largest model whose rows are tried, in elements.
MAX_ELEMENTS_OF_MODEL = 2**23
#: The designs that ``"auto"`` considers, from the most accurate on. After them come halvings, and each client alone.
DESIGNS: Sequence[Which] = ("all", "pairs+leave-two-out", "pairs+leave-one-out", "both")
#: The largest number of members of all coalitions of a design that ``"auto"`` considers.
MAX_MEMBERS = 2**21
#: The largest price of coalitions that ``"auto"`` trains at once, if the user names no price.
MAX_FITS_AT_ONCE = 2.0
#: The largest number of halvings that ``"auto"`` considers. Each costs a run, one by one.
MAX_HALVINGS = 3


class RowTrial(NamedTuple):
    """What a dry run found out about rows of the run's module."""

    #: Why coalitions cannot be trained at once. Empty: no reason is known.
    why_not: str
    #: Multiplications and additions of one model's step, in millions.
    megaflops: float = 0.0
    num_elements: int = 0
    #: Whether the rows of all clients take their steps together.
    joins_clients: bool = False
    #: Whether training enlarges rounding errors, so that witnesses are trained again.
    enlarges_rounding: bool = False


#: At sites, and if the dry run has failed.
NO_TRIAL = RowTrial("They are trained one by one.")


class Choice(NamedTuple):
    """The coalitions that a run trains."""

    #: A design of :func:`flsv.functional.few_coalitions`, ``"halves"``, or a list of coalitions.
    design: Any
    is_at_once: bool
    #: In training runs of the whole federation.
    price: float
    #: The number of times that all clients are halved.
    halvings: int = 0


@dataclass(frozen=True)
class Request:
    """The coalitions and the price that a user has asked for.

    Args:
        coalitions: the coalitions to train, or ``"auto"``.
        max_fits: the largest price of ``"auto"``, in runs. None: each client alone one by one, or
            :data:`MAX_FITS_AT_ONCE` at once.
        halvings: the number of halvings, with ``"auto"`` the largest one.
    """

    coalitions: Coalitions
    max_fits: float | None
    halvings: int = 0


@dataclass(frozen=True)
class PriceList:
    """The prices of the coalitions of a run.

    Args:
        num_batches: each client's number of batches in a round, ``[n]``.
        clients_per_round: the mean size of a cohort.
        trial: what the dry run found out.
        num_rounds: the run's number of rounds.
        num_scored_batches: the number of batches on whose outputs a model is scored. None: a Trainer validates it.
    """

    num_batches: Sequence[float]
    clients_per_round: float
    trial: RowTrial = NO_TRIAL
    num_rounds: int = 1
    num_scored_batches: float | None = 1.0

    @property
    def num_clients(self) -> int:
        return len(self.num_batches)

    def one_by_one(self, masks: Tensor) -> float:
        """Return the price of coalitions ``[K, n]`` that train one by one."""
        return equivalent_runs(masks, self.clients_per_round)

    def at_once(self, masks: Tensor) -> float:
        """Return the price of coalitions ``[K, n]`` that train at once: of rows, witnesses and scores."""
        if self.trial.why_not:
            return float("inf")
        step = 1 + self.trial.megaflops / MEGAFLOPS_OF_STEP
        cost_of_clients = sum(self.num_batches) * step + self.num_clients * VISIT
        cost_of_run = self.num_rounds * cost_of_clients * self._part_of_clients
        scoring = self.num_valued_rounds(masks) * self._cost_of_scores(masks)
        cost = SETUP + self.num_rounds * self._cost_of_round(masks) + scoring
        return cost / cost_of_run + self._cost_of_witnesses()

    def _cost_of_witnesses(self) -> float:
        """Return the price of the fits of the clients with the fewest and the most batches."""
        fewest, most = min(self.num_batches), max(self.num_batches)
        num_batches = fewest + most
        if self.trial.enlarges_rounding:
            num_batches += 2 * fewest + most
        return num_batches / sum(self.num_batches)

    def num_valued_rounds(self, masks: Tensor) -> int:
        """Return the number of rounds after which the models of coalitions ``[K, n]`` that train at once are scored."""
        cost = self.num_rounds * self._cost_of_round(masks)
        return num_valued_rounds(cost, num_scored=self._cost_of_scores(masks))

    @property
    def _part_of_clients(self) -> float:
        return self.clients_per_round / self.num_clients

    def _cost_of_scores(self, masks: Tensor) -> float:
        """Return the cost of scoring the models of coalitions after one round."""
        if self.num_scored_batches is None:
            return len(masks) * VALIDATION
        forward = self.trial.megaflops / 3 / MEGAFLOPS_OF_STEP
        cost_of_model = SCORED_MODEL + self.num_scored_batches * (SCORED_BATCH + forward)
        return len(masks) * cost_of_model

    def _cost_of_round(self, masks: Tensor) -> float:
        num_coalitions = masks.sum(0) * self._part_of_clients + 1  # [n], and the coalition of all
        millions = self.trial.num_elements / 1e6
        flops = self.trial.megaflops / MEGAFLOPS_OF_ROWS
        work_of_row = ROW + flops + millions / MILLIONS_OF_ELEMENTS
        steps = max(self.num_batches) if self.trial.joins_clients else sum(self.num_batches)
        cost = steps * STEP_OF_ROWS
        for batches, count in zip(self.num_batches, num_coalitions.tolist()):
            cost += batches * count * work_of_row + VISIT
            cost += count * millions / MILLIONS_OF_ELEMENTS  # the server's part
        return cost


def batches_of_clients(config: FederationConfig, data: FederatedDataModule) -> list[int]:
    """Return about how many batches each client trains on in a round, at least one."""
    batch_size = data.batch_size or 1
    num_batches = []
    for name, num_samples in zip(data.client_names, data.num_samples.tolist()):
        # A local training of a number of steps counts as an epoch.
        num_epochs = config.work_of(name).epochs or 1
        num_batches.append(max(1, ceil(num_samples / batch_size) * num_epochs))
    return num_batches


def price_list(
    config: FederationConfig,
    run: MeasuredRun,
    clients_per_round: float | None,
    trial: RowTrial,
    outputs: Outputs,
) -> PriceList:
    """Return the prices of a run's coalitions, given the outputs of one model on the validation samples."""
    data = run.data
    num_scored_batches: float | None = None
    if outputs:
        num_scored_batches = max(map(len, outputs.values())) / (data.batch_size or 1)
    return PriceList(
        batches_of_clients(config, data),
        clients_per_round or data.num_clients,
        trial,
        num_rounds=max(1, run.trainer.max_epochs or 1),
        num_scored_batches=num_scored_batches,
    )


def max_fits_of_retraining(sampler: ClientSampler, num_clients: int) -> float:
    """Return what ``flsv retrain`` may cost for each seed: as much as each client alone and all but one, one by one."""
    clients_per_round = float(sampler.inclusion_probabilities(num_clients, {}).sum())
    return equivalent_runs(coalition_masks("both", num_clients), clients_per_round)


def choose(request: Request, prices: PriceList) -> Choice:
    """Choose the coalitions to train: those that are asked for, or the most accurate ones within the price."""
    if request.coalitions != "auto":
        return _cheaper(request.coalitions, request.halvings, prices)
    choices = (_cheaper(design, 0, prices) for design in _designs(prices.num_clients))
    return _first_within_price(request, choices) or one_by_one(request, prices)


def one_by_one(request: Request, prices: PriceList) -> Choice:
    """Choose the coalitions to train if these can only be trained one by one."""
    if request.coalitions != "auto":
        return _one_by_one(request.coalitions, request.halvings, prices)
    choices = [_one_by_one(design, 0, prices) for design in _designs(prices.num_clients)]
    most_halvings = min(request.halvings, prices.num_clients - 1)
    for halvings in range(most_halvings, 0, -1):
        choices.append(_one_by_one("halves", halvings, prices))
    return _first_within_price(request, choices) or _one_by_one("singles", 0, prices)


def _first_within_price(request: Request, choices: Iterable[Choice]) -> Choice | None:
    for choice in choices:
        limit = request.max_fits
        if limit is None:
            limit = MAX_FITS_AT_ONCE if choice.is_at_once else 1.0
        if choice.price <= limit:
            return choice
    return None


def _designs(num_clients: int) -> Iterator[Which]:
    """Yield the designs that are not too large, from the most accurate on."""
    for design in DESIGNS:
        sizes = sizes_of_design(num_clients, design)
        num_members = sum(size * comb(num_clients, size) for size in sizes)
        if num_members <= MAX_MEMBERS:
            yield design


def _one_by_one(design: Coalitions, halvings: int, prices: PriceList) -> Choice:
    masks = coalition_masks(design, prices.num_clients)
    if halvings:
        masks = with_any_halves(masks, halvings)
    return Choice(design, is_at_once=False, price=prices.one_by_one(masks), halvings=halvings)


def _cheaper(design: Coalitions, halvings: int, prices: PriceList) -> Choice:
    choice = _one_by_one(design, halvings, prices)
    if halvings:  # which coalitions are halves is known after the others are trained
        return choice
    price_at_once = prices.at_once(coalition_masks(design, prices.num_clients))
    if price_at_once < choice.price:
        return Choice(design, is_at_once=True, price=price_at_once)
    return choice
