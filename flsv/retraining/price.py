"""The price of training coalitions, and the choice of those that a run trains.

A price is a number of runs of the whole federation. It is counted and not timed, so that a run chooses the same
coalitions, and so has the same values, on every machine. The counts are numbers of steps, rows, elements and
multiplications. The constants are rough, and ``python tools/costs.py at-once`` measures some cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb
from typing import Any, NamedTuple

from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.data import FederatedDataModule
from flsv.functional.shapley.few_coalitions import Which
from flsv.metrics.coalitions.design import DESIGNS, coalition_masks, design_within, equivalent_runs

# All constants are relative to the time of Lightning's own work for a step of one small model.
#: Multiplications and additions, in millions, that take as long: of one model, and of rows.
MEGAFLOPS_OF_STEP = 15.0
MEGAFLOPS_OF_ROWS = 20.0
#: A step of rows, besides its multiplications.
STEP_OF_ROWS = 1.3
#: Numbers of a model, in millions, that an optimizer or the server's average handles in that time.
MILLIONS_OF_ELEMENTS = 1.0
#: The beginning and end of a client's training in a round.
VISIT = 0.5
#: The largest model whose rows are tried, in elements.
MAX_ELEMENTS_OF_MODEL = 2**23
#: The largest number of coalitions that ``"auto"`` considers.
MAX_COALITIONS = 2**16


class RowTrial(NamedTuple):
    """What a dry run found out about rows of the run's module."""

    #: Why coalitions cannot be trained at once. Empty: no reason is known.
    why_not: str
    #: Multiplications and additions of one model's step, in millions.
    megaflops: float = 0.0
    num_elements: int = 0
    #: Whether the rows of all clients take their steps together.
    joins_clients: bool = False


class Choice(NamedTuple):
    """The coalitions that a run trains."""

    #: A design of :func:`flsv.functional.few_coalitions`, ``"halves"``, or a list of coalitions.
    design: Any
    is_at_once: bool
    #: In training runs of the whole federation.
    price: float


@dataclass(frozen=True)
class PriceList:
    """The prices of the coalitions of a run.

    Args:
        num_batches: each client's number of batches in a round, ``[n]``.
        clients_per_round: the mean size of a cohort.
        trial: what the dry run found out.
    """

    num_batches: Sequence[float]
    clients_per_round: float
    trial: RowTrial

    def one_by_one(self, masks: Tensor) -> float:
        """Return the price of coalitions ``[K, n]`` that train one by one."""
        return equivalent_runs(masks, self.clients_per_round)

    def at_once(self, masks: Tensor) -> float:
        """Return the price of coalitions ``[K, n]`` that train at once, with that of two witnesses."""
        if self.trial.why_not:
            return float("inf")
        part_of_clients = self.clients_per_round / len(self.num_batches)
        steps_of_run = sum(self.num_batches) * part_of_clients
        flops = self.trial.megaflops
        cost_of_run = steps_of_run * (1 + flops / MEGAFLOPS_OF_STEP)
        cost_of_round = self._cost_of_round(masks, part_of_clients)
        witnesses = (min(self.num_batches) + max(self.num_batches)) / sum(self.num_batches)
        return cost_of_round / cost_of_run + witnesses

    def _cost_of_round(self, masks: Tensor, part_of_clients: float) -> float:
        num_coalitions = masks.sum(0) * part_of_clients + 1  # [n], and the coalition of all
        millions = self.trial.num_elements / 1e6
        work_of_row = self.trial.megaflops / MEGAFLOPS_OF_ROWS + millions / MILLIONS_OF_ELEMENTS
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


def choose(coalitions: Any, max_fits: float | None, prices: PriceList) -> Choice:
    """Choose the coalitions to train.

    Args:
        coalitions: those that the user has asked for. ``"auto"``: the most accurate within ``max_fits``.
        max_fits: the largest price, in runs. None: that of each client alone, one by one.
        prices: the prices of the run's coalitions.
    """
    num_clients = len(prices.num_batches)
    if coalitions != "auto":
        return _cheaper(coalitions, prices)
    if max_fits is None:
        return one_by_one(coalitions, max_fits, prices)
    for design, sizes in DESIGNS.items():
        if sum(comb(num_clients, size) for size in set(sizes(num_clients))) > MAX_COALITIONS:
            continue
        choice = _cheaper(design, prices)
        if choice.price <= max_fits:
            return choice
    return one_by_one("auto", max_fits, prices)


def one_by_one(coalitions: Any, max_fits: float | None, prices: PriceList) -> Choice:
    """Choose the coalitions to train if these can only be trained one by one."""
    design = coalitions
    if coalitions == "auto":
        design = _design_one_by_one(max_fits, prices)
    masks = coalition_masks(design, len(prices.num_batches))
    return Choice(design, is_at_once=False, price=prices.one_by_one(masks))


def _design_one_by_one(max_fits: float | None, prices: PriceList) -> Which:
    num_clients = len(prices.num_batches)
    return design_within(max_fits or 1.0, num_clients, prices.clients_per_round)


def _cheaper(design: Any, prices: PriceList) -> Choice:
    masks = coalition_masks(design, len(prices.num_batches))
    price = prices.one_by_one(masks)
    price_at_once = float("inf") if design == "halves" else prices.at_once(masks)
    if price_at_once < price:
        return Choice(design, is_at_once=True, price=price_at_once)
    return Choice(design, is_at_once=False, price=price)
