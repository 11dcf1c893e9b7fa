"""AfterTheRun: trains coalitions when a run has ended, and completes the values of the metrics that wait for them.

If the coalitions were rows of one batched model, one of them is trained again by a fit, to check the rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.rounding import Rounding, rounding_of
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.games.members import members_of
from flsv.games.performance import CLASSIFICATION, ModelScore
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.coalition_fit import FitOrder, FitResult
from flsv.retraining.forked_fits import ForkedFits
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.proof import difference
from flsv.retraining.train_fits import train_fits
from flsv.retraining.utility_store import Row, UtilityStore
from flsv.retraining.whole_fits import COALITIONS, Unproved, WholeFits, called, trained_again
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import ChildFailed

#: Seconds between two log lines about the trainings' progress.
PAUSE = 10.0


@dataclass(frozen=True, eq=False)
class EndedRun:
    """A run after its last round.

    Args:
        trainer: the fit's trainer.
        data: the data module, with its samples assigned to clients.
        seed: the run's seed.
        folder: the run's folder, into which the coalitions' utilities are written; None: they are not written.
        settings: the settings that these utilities depend on.
        resumed: whether the run was resumed, so that utilities that are already in the folder belong to it.
        model: ``[P]``, the global model after the last round.
        last: the index of that round.
        delivered: ``[P]``, the model in the module after training, which callbacks may have changed.
    """

    trainer: L.Trainer
    data: FederatedDataModule
    seed: int
    folder: Path | None
    settings: Mapping[str, str]
    resumed: bool
    model: Tensor
    last: int
    delivered: Tensor


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return ``{name: performance measure}`` of all measures by which coalitions' models are scored for ``metrics``.

    If one of them is a measure of a classifier's outputs, such as accuracy, all such measures are included, since
    ``flsv retrain`` shows shares by each of them."""
    measures = {called(metric.measured_by): metric.measured_by for metric in metrics}
    classes = {} if measures.keys().isdisjoint(CLASSIFICATION) else {name: name for name in CLASSIFICATION}
    return measures | classes


class NotCompared(RuntimeError):
    """Error: a coalition that is a row could not be compared with a fit; the message gives the reason."""


def row_disproved(forks: ForkedFits, order: FitOrder, row: Tensor, rounding: Rounding) -> str | None:
    """Train a coalition by a fit, and compare its model with the one that was trained as a row of a batched model.

    Args:
        forks: the object that trains the coalition, by a fork.
        order: the coalition, and the round after which the models are compared.
        row: ``[P]``, the model that was trained as a row, after this round.
        rounding: the tolerances of the run's arithmetic.

    Returns:
        The reason why the row is wrong; None if the models are equal up to rounding.

    Raises:
        NotCompared: the fit was killed from outside, which tells nothing of the row.
    """
    names = f"the federation of clients {list(order.members)} alone"
    ((_, found),) = forks.train([order])
    if isinstance(found, ChildFailed):
        if found.killed:
            raise NotCompared(f"{names}, whose model is compared with that of its row, could not be trained ({found})")
        return f"{names} has failed ({found})"
    again = partial(trained_again, forks, order)
    share = difference(found.last, row.cpu(), found.start, again, rounding)
    if share is None:
        return None
    return f"{names} comes to a model that lies {100 * share:.2g} % of its way from that of the row"


class AfterTheRun:
    """Training of coalitions after a run, each by a fit of its own, for metrics whose values need their models.

    Args:
        metrics: ``{name: metric}`` of the metrics that lack values; at least one lacks those of a round.
        masks: bool ``[K, n]``, the members of the coalitions, the empty and the full coalition first.
        beginning: the state of the run's fit before its first round, from which the coalitions' fits start.
        initial: the module's ``state_dict`` before the first round.
    """

    def __init__(
        self,
        metrics: Mapping[str, ShadowShapley],
        masks: Tensor,
        beginning: KeptBeginning,
        initial: dict[str, Any],
    ) -> None:
        self._metrics, self._masks, self._beginning, self._initial = dict(metrics), masks, beginning, initial
        self._rounds = sorted({index for metric in metrics.values() for index in metric.valued.tolist()})

    def train(self, run: EndedRun) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions, and complete the metrics' values.

        Returns:
            ``{round: {metric: values}}``, the metrics' values after each round. If a training has failed, an empty
            dictionary, with a warning.
        """
        measures, ranks = measures_of(self._metrics.values()), ranks_of(run.trainer)
        path = None if run.folder is None else run.folder / COALITIONS
        if path is not None and ranks.rank == 0 and not run.resumed:
            path.unlink(missing_ok=True)  # it belongs to an earlier run, maybe with another module
        store = UtilityStore(path, list(measures), run.settings, rounds=self._rounds, ranks=ranks, anew=True)
        way = self._beginning.fits(run.trainer.lightning_module, run.data, measures)
        found = run.model, run.last
        fits = WholeFits(way, run.data.num_clients, self._initial, self._rounds, found, rounding_of(run.trainer))
        coalitions = members_of(self._masks[2:])
        try:
            train_fits(fits, run.data.num_samples.tolist(), coalitions, run.seed, store, _Says())
        except ConfigurationError as error:  # the federation itself is trained
            rank_zero_warn(f"{', '.join(self._metrics)}: there are no values. {error}{self._remedy(error)}")
            return {}
        assert fits.everybody is not None
        return self._complete(
            [store.rows(run.seed, members) for members in coalitions], store.names, fits.everybody, run.last
        )

    def _complete(
        self, rows: Sequence[Sequence[Row]], names: Sequence[str], everybody: FitResult, last: int
    ) -> dict[int, dict[str, Tensor]]:
        """Give the metrics the coalitions' utilities; return ``{round: {metric: values}}``.

        Args:
            rows: for each coalition but the empty and the full one, its utilities after each round.
            names: the names of the performance measures, in the order of the utilities of a round.
            everybody: the result of the coalition of all clients.
            last: the index of the run's last round.
        """
        found: dict[int, dict[str, Tensor]] = {index: {} for index in self._rounds}
        for name, metric in self._metrics.items():
            valued = metric.valued.tolist()
            by = called(metric.measured_by)
            averaged = valued[-1] == last and not torch.equal(everybody.last, everybody.delivered)
            if averaged or metric.ends.isnan().all():
                metric.deliver(everybody.before[by], everybody.curves[by][-1])
            places, of = [self._rounds.index(index) for index in valued], names.index(by)
            cells = [[curve[place][of] for curve in rows] for place in places]
            utilities = torch.tensor(cells, dtype=torch.float64)  # [R, K, 1], or per class [R, K, M]
            utilities = utilities.squeeze(-1) if utilities.shape[-1] == 1 else utilities
            for index, values in metric.complete(self._masks, utilities).items():
                found[index][name] = values
        return found

    def _remedy(self, error: ConfigurationError) -> str:
        """Return the end of the message about ``error``: what the user can do."""
        if not isinstance(error, Unproved):
            return " flsv retrain trains the coalitions that are missing."
        if self._beginning.forks is not None:
            return (
                ": training depends on something that neither its seed nor the state of this process at the beginning "
                "sets, as the time, a file that it writes or a generator of its own does. Seed it, and train again."
            )
        return (
            f": coalitions were trained by copies of the Trainer and the module, since {self._beginning.no_fork}, and "
            "a copy is bound to something of the original. Value the run by flsv retrain, or give flsv.retrain a "
            "function that makes the module."
        )


class _Says:
    """Callable that logs a line about the progress, unless it has logged one within the last :data:`PAUSE` seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._said > PAUSE:
            self._said = time.monotonic()
            rank_zero_info(f"flsv: {text} are trained.")
