"""The price of training coalitions, and the choice of those that a run trains.

A price is a number of runs of the whole federation. It is counted and not timed, so that a run chooses the same
coalitions, and so has the same values, on every machine. The counts are numbers of steps, rows, elements and
multiplications. The constants are rough, and ``python tools/costs.py at-once`` measures some cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, comb, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.data import FederatedDataModule
from flsv.functional.shapley.few_coalitions import sizes_of_design
from flsv.metrics.coalitions.design import (
    NO_OUTPUTS_FOR_HALVES,
    equivalent_runs,
    num_valued_rounds,
)
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.measured_run import MeasuredRun
from flsv.sampling import ClientSampler
from flsv.utilities.errors import ConfigurationError
from flsv.values.coalition_files import Outputs
from flsv.values.designs import BySize, Design, Halves, design_named

# All constants are relative to the time of Lightning's own work for a step of one small model.
#: Multiplications and additions, in millions, that take as long: of one model, and of rows.
MEGAFLOPS_OF_STEP = 15.0
MEGAFLOPS_OF_ROWS = 35.0
#: The same of rows of a large model, whose weights do not stay in a core's caches from one product to the next, and the
#: number of elements from which a model is large. See the case ``at-once/large6`` of ``tools/costs.py``.
MEGAFLOPS_OF_LARGE_ROWS = 10.0
MIN_ELEMENTS_OF_LARGE = 1_000_000
#: A step of rows, and each row in it, besides its multiplications.
STEP_OF_ROWS = 1.3
ROW = 0.004
#: Numbers of a model, in millions, that an optimizer or the server's average handles in that time.
MILLIONS_OF_ELEMENTS = 2.0
#: The beginning and end of a client's training in a round.
VISIT = 0.5
#: The set-up of a fit that trains coalitions at once, and of the witnesses' fits.
SETUP = 150.0
#: The set-up of a fit that trains one coalition.
SETUP_OF_COALITION = 25.0
#: How much longer computations in 64 bits take: of one model, and of rows.
DOUBLE = 1.5
DOUBLE_ROWS = 2.0
#: The scoring of a model by its outputs, and each validation batch in it, besides its multiplications.
SCORED_MODEL = 0.3
SCORED_BATCH = 0.002
#: The scoring of a model by a Trainer's validation.
VALIDATION = 20.0
#: The largest model whose rows are tried, in elements.
MAX_ELEMENTS_OF_MODEL = 2**23
#: The designs that ``"auto"`` considers, from the most accurate on. After them come halvings, and each client alone.
ALL, BOTH, SINGLES = BySize("all"), BySize("both"), BySize("singles")
DESIGNS = (ALL, BySize("pairs+leave-two-out"), BySize("pairs+leave-one-out"), BOTH)
#: The largest number of members of all coalitions of a design that ``"auto"`` considers.
MAX_MEMBERS = 2**21
#: The largest price of coalitions that ``"auto"`` trains at once, if the user names no price.
MAX_FITS_AT_ONCE = 2.0
#: The work, in steps of one small model, up to which ``"auto"`` trains all coalitions, whatever the run costs: 15 to 30
#: seconds on one core. So the values of small runs are exact for their seed, at once or one by one.
MAX_WORK_OF_ALL = 10_000.0
#: The largest number of elements of all models that the coalitions of one group receive from their members in a round.
#: It is a constant, and not what memory is free, so that a model is rounded in the same way on every machine.
MAX_ELEMENTS_OF_GROUP = 2**26
#: The largest number of halvings that ``"auto"`` considers. Each costs a run, one by one.
MAX_HALVINGS = 3


class RowTrial(NamedTuple):
    """What a dry run found out about rows of the run's module."""

    #: Why coalitions cannot be trained at once. Empty: no reason is known.
    why_not: str
    #: Multiplications and additions of one model's step, in millions. NaN: they were not counted.
    megaflops: float = float("nan")
    num_elements: int = 0
    #: Whether the rows of all clients take their steps together.
    joins_clients: bool = False
    #: Whether training enlarges rounding errors, so that all is trained in 64 bits, too.
    enlarges_rounding: bool = False


#: At sites, and if the dry run has failed.
NO_TRIAL = RowTrial("They are trained one by one.")


class Choice(NamedTuple):
    """The coalitions that a run trains."""

    design: Design
    is_at_once: bool
    #: In training runs of the whole federation.
    price: float
    #: What is trained if these cannot be trained at once, as they should be. None: they should not.
    fallback: Any = None  # a Choice

    @classmethod
    def of_record(cls, record: Sequence[Any], design: Design | None) -> Choice:
        """Return the choice that :meth:`record` has described, of the ``design`` that was asked for, if one was."""
        coalitions, is_at_once, price, halvings = record
        return cls(design or design_named(coalitions, halvings), is_at_once, price)

    def record(self, num_clients: int) -> list[Any]:
        """Describe the choice for checkpoints."""
        halvings = self.design.halvings if isinstance(self.design, Halves) else 0
        return [self.design.plain(num_clients), self.is_at_once, self.price, halvings]


@dataclass(frozen=True)
class Request:
    """The coalitions and the price that a user has asked for.

    Args:
        design: the coalitions to train. None: the most accurate ones within the price.
        max_fits: the largest price of these, in runs. None: each client alone one by one, or :data:`MAX_FITS_AT_ONCE`
            at once. But for 1, all coalitions may cost :data:`MAX_WORK_OF_ALL`.
        may_halve: whether halves are among the coalitions to choose from.
    """

    design: Design | None
    max_fits: float | None
    may_halve: bool = False

    @classmethod
    def of(cls, metrics: Mapping[str, ShadowShapley]) -> Request:
        """Return what all ``metrics`` ask for. Raise ConfigurationError if they need different coalitions."""
        designs = [metric.design for metric in metrics.values()]
        if any(design != designs[0] for design in designs):
            raise ConfigurationError(
                f"The metrics {list(metrics)} need different coalitions, but a run trains one set of coalitions. "
                "Give these metrics the same coalitions, or keep only one of them."
            )
        limits = [metric.max_fits for metric in metrics.values() if metric.max_fits is not None]
        return cls(designs[0], max_fits=min(limits, default=None))

    @property
    def may_train_at_once(self) -> bool:
        design = self.design
        return design is None or not (design.grows or design == SINGLES)

    def with_halves(self, metrics: Mapping[str, ShadowShapley], games: Any) -> Request:
        """Let halves be chosen if they can be. Raise ConfigurationError if they are asked for and cannot be."""
        if self.design is not None and not self.design.grows:
            return self
        for name, metric in metrics.items():
            has_outputs = games.output_measure(metric.measure) is not None
            if has_outputs and metric.evaluators == "server":
                continue
            if self.design is None:
                return self
            raise ConfigurationError(f"metric {name!r}: {NO_OUTPUTS_FOR_HALVES}")
        return replace(self, may_halve=True)


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
        cost = self._cost_of_rows(masks)
        price_of_witnesses = self._price_of_witnesses()
        if self.trial.enlarges_rounding:
            cost += DOUBLE_ROWS * self._cost_of_rows(masks)
            price_of_witnesses += DOUBLE * (1 + self._price_of_witnesses())
        return cost / self.work_of_run + price_of_witnesses

    def work(self, masks: Tensor, is_at_once: bool) -> float:
        """Return the work of training and scoring coalitions ``[K, n]``, in steps of one small model. NaN: a step was
        not counted.
        """
        if isnan(self.trial.megaflops):
            return float("nan")
        if is_at_once:
            return self.at_once(masks) * self.work_of_run
        trainings = self.one_by_one(masks) * self.work_of_run + len(masks) * SETUP_OF_COALITION
        return trainings + self.num_valued_rounds(masks) * self._cost_of_scores(masks)

    @property
    def work_of_run(self) -> float:
        """Return the work of the run, in steps of one small model."""
        millions = self.trial.num_elements / 1e6
        step = 1 + self.trial.megaflops / MEGAFLOPS_OF_STEP + millions / MILLIONS_OF_ELEMENTS
        work_of_clients = sum(self.num_batches) * step + self.num_clients * VISIT
        return self.num_rounds * work_of_clients * self._part_of_clients

    def _cost_of_rows(self, masks: Tensor) -> float:
        scoring = self.num_valued_rounds(masks) * self._cost_of_scores(masks)
        return (
            self._num_groups(masks) * SETUP + self.num_rounds * self._cost_of_round(masks) + scoring
        )

    def _num_groups(self, masks: Tensor) -> int:
        return num_groups(len(masks), self.trial.num_elements, self.num_clients)

    def _price_of_witnesses(self) -> float:
        """Return the price of the fits of the clients with the fewest and the most batches."""
        num_batches = min(self.num_batches) + max(self.num_batches)
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
        num_groups = self._num_groups(masks)
        # Each group trains the coalition of all, and both witnesses, too.
        num_rows = masks.sum(0) * self._part_of_clients + num_groups  # [n]
        num_rows[self.num_batches.index(min(self.num_batches))] += num_groups
        num_rows[self.num_batches.index(max(self.num_batches))] += num_groups
        millions = self.trial.num_elements / 1e6
        is_large = self.trial.num_elements >= MIN_ELEMENTS_OF_LARGE
        flops = self.trial.megaflops / (MEGAFLOPS_OF_LARGE_ROWS if is_large else MEGAFLOPS_OF_ROWS)
        work_of_row = ROW + flops + millions / MILLIONS_OF_ELEMENTS
        steps = max(self.num_batches) if self.trial.joins_clients else sum(self.num_batches)
        cost = num_groups * steps * STEP_OF_ROWS
        for batches, count in zip(self.num_batches, num_rows.tolist()):
            cost += batches * count * work_of_row + num_groups * VISIT
            cost += count * millions / MILLIONS_OF_ELEMENTS  # the server's part
        return cost


def num_groups(num_coalitions: int, num_elements: int, num_clients: int) -> int:
    """Return the number of fits in which coalitions train at once, by the elements of their members' models."""
    max_size = max(1, MAX_ELEMENTS_OF_GROUP // max(1, num_elements * num_clients))
    return max(1, ceil(num_coalitions / max_size))


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
        run.clients_per_round,
        trial,
        num_rounds=max(1, run.trainer.max_epochs or 1),
        num_scored_batches=num_scored_batches,
    )


def max_valued_rounds(
    config: FederationConfig,
    run: MeasuredRun,
    choice: Choice,
    prices: PriceList,
    num_validation_samples: int,
) -> int:
    """Return the largest number of rounds with values, so that scoring all coalitions' models does not take long beside
    training.
    """
    masks = choice.design.planned_masks(run.data.num_clients)
    if choice.is_at_once:
        return prices.num_valued_rounds(masks)
    num_trained = _num_trained_samples(config, run, masks)
    return num_valued_rounds(num_trained, len(masks) * num_validation_samples)


def _num_trained_samples(config: FederationConfig, run: MeasuredRun, masks: Tensor) -> float:
    """Return about how many samples the training of the coalitions ``masks`` passes through the module."""
    data = run.data
    sizes = masks.sum(1)
    # The empty coalition and that of all clients are not trained.
    trained_sizes = sizes[(sizes > 0) & (sizes < data.num_clients)]
    trainings_per_round = trained_sizes.clamp_max(run.clients_per_round).sum()  # of one client

    # A local training of a number of steps counts as an epoch.
    num_epochs = [config.work_of(name).epochs or 1 for name in data.client_names]
    samples_per_training = (data.num_samples * torch.tensor(num_epochs)).double().mean()
    return float((run.trainer.max_epochs or 0) * trainings_per_round * samples_per_training)


def max_fits_of_retraining(sampler: ClientSampler, num_clients: int) -> float:
    """Return what ``flsv retrain`` may cost for each seed: as much as each client alone and all but one, one by one."""
    clients_per_round = float(sampler.inclusion_probabilities(num_clients, {}).sum())
    return equivalent_runs(BOTH.masks(num_clients), clients_per_round)


def choose(request: Request, prices: PriceList) -> Choice:
    """Choose the coalitions to train: those that are asked for, or the most accurate ones within the price."""
    if request.design is not None:
        return _cheaper(request.design, prices)
    choices = (_cheaper(design, prices) for design in _designs(prices.num_clients))
    return _first_within_price(request, choices, prices) or one_by_one(request, prices)


def one_by_one(request: Request, prices: PriceList) -> Choice:
    """Choose the coalitions to train if these can only be trained one by one."""
    if request.design is not None:
        return _one_by_one(request.design, prices)
    designs: list[Design] = [*_designs(prices.num_clients)]
    if request.may_halve:
        most_halvings = min(MAX_HALVINGS, prices.num_clients - 1)
        designs += [Halves(halvings) for halvings in range(most_halvings, 0, -1)]
    choices = [_one_by_one(design, prices) for design in designs]
    cheapest = _one_by_one(SINGLES, prices)
    return _first_within_price(request, choices, prices) or cheapest


def _first_within_price(
    request: Request, choices: Iterable[Choice], prices: PriceList
) -> Choice | None:
    for choice in choices:
        limit = request.max_fits
        if limit is None:
            limit = MAX_FITS_AT_ONCE if choice.is_at_once else 1.0
        if choice.price <= limit or _is_exact_and_cheap(request, choice, prices):
            return choice
    return None


def _is_exact_and_cheap(request: Request, choice: Choice, prices: PriceList) -> bool:
    """Return whether all coalitions would be trained by little work. ``max_fits=1`` asks for each client alone."""
    if choice.design != ALL or request.max_fits == 1:
        return False
    masks = choice.design.masks(prices.num_clients)
    return prices.work(masks, choice.is_at_once) <= MAX_WORK_OF_ALL


def _designs(num_clients: int) -> Iterator[Design]:
    """Yield the designs that are not too large, from the most accurate on."""
    for design in DESIGNS:
        sizes = sizes_of_design(num_clients, design.name)
        num_members = sum(size * comb(num_clients, size) for size in sizes)
        if num_members <= MAX_MEMBERS:
            yield design


def _one_by_one(design: Design, prices: PriceList) -> Choice:
    masks = design.planned_masks(prices.num_clients)
    return Choice(design, is_at_once=False, price=prices.one_by_one(masks))


def _cheaper(design: Design, prices: PriceList) -> Choice:
    choice = _one_by_one(design, prices)
    if design.grows:  # which coalitions follow is known after the others are trained
        return choice
    price_at_once = prices.at_once(design.masks(prices.num_clients))
    if price_at_once < choice.price:
        return Choice(design, is_at_once=True, price=price_at_once)
    return choice
