"""retrain: computes clients' values by retraining the federation with coalitions of them, like ``flsv retrain``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv.data import FederatedDataModule
from flsv.functional.shapley.few_coalitions import Which, few_coalitions, retrained_shapley
from flsv.games.members import Members
from flsv.games.performance import Judges, Mode, judged_by, performance_of
from flsv.games.retrained_utility import RetrainedUtility
from flsv.report.shares import RANKING_ONLY
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility, find_loop
from flsv.retraining.whole_fits import Spare, all_take_part, coalition_loop
from flsv.sampling import FixedCohort
from flsv.utilities.csv_files import NAN
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import global_rngs, restore_global_rngs, seed_or_default


class _OfSpare(RetrainedUtility):
    """Utility of coalitions, each trained by copies of a Trainer and a module that have not been fitted."""

    def __init__(self, spare: Spare, seed: int, module: L.LightningModule, data: FederatedDataModule, by: Any):
        self._spare, self._seed = spare, seed
        super().__init__(lambda cohort: self._pair(cohort)[0], module, data, by, 10**6)

    def _made(self, members: Members) -> tuple[L.Trainer, L.LightningModule]:
        return self._pair(FixedCohort(members))

    def _pair(self, cohort: FixedCohort) -> tuple[L.Trainer, L.LightningModule]:
        """Return a copy of the Trainer, whose loop always draws ``cohort``, and a copy of the module."""
        trainer, module = self._spare.made()
        loop = find_loop(trainer)
        own = callbacks_of(trainer)
        own[:] = [coalition_loop(c, cohort, self._seed) if c is loop else c for c in own]
        return trainer, module


@checked
def retrain(
    trainer: L.Trainer,
    module: L.LightningModule | Callable[[], L.LightningModule],
    data: FederatedDataModule,
    which: Which = "auto",
    *,
    metric: str = "accuracy",
    mode: Mode | None = None,
    seeds: Count = 3,
    judges: Judges = "server",
) -> DataFrame:
    """Compute clients' values by training the federation again for each of several coalitions of clients.

    Give a trainer, a module and data as for a fit that has not begun; none of them is changed. Coalitions are trained
    side by side if the module allows it, otherwise one after the other, each by a copy of the trainer.

    Args:
        trainer: a trainer with a :class:`flsv.FederatedLoop` among its callbacks.
        module: the module, or a function that makes the module. A function is called under each seed, so that the
            initial weights are drawn anew, as ``flsv retrain`` does; a module starts from the same weights under all
            seeds, so that most of the random variation is not seen.
        data: the federation's data module, with a validation set for the server, or held-out samples at the clients.
        which: the coalitions, see :func:`flsv.functional.few_coalitions`. If they cannot be trained side by side,
            ``"auto"`` stands for ``"both"``: each client alone, all clients but one, and all clients.
        metric: the performance of a model, see :class:`flsv.games.RetrainedUtility`.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) logged value is better.
        judges: whose samples models are scored on, see :class:`flsv.metrics.ShadowShapley`.
        seeds: the number of trainings of every coalition, each with another seed. The first seed is the loop's seed, or
            the seed of ``seed_everything``.

    Returns:
        A table with a row per client and the columns ``client``, ``client_name``, ``value`` (in the metric's unit),
        ``low`` and ``high`` (the ends of the value's 90 % interval), and ``share`` (NaN if values from these coalitions
        only allow a ranking).

    Raises:
        ConfigurationError: the trainer has been fitted, or has no FederatedLoop; an argument is out of range, or does
            not fit the federation.

    Example:
        >>> import tempfile
        >>> from functools import partial
        >>> from flsv import ClassifierClient, FederatedLoop
        >>> from flsv.data import SizePartitioner
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = L.Trainer(
        ...     max_epochs=1, callbacks=[FederatedLoop(seed=0)], default_root_dir=tempfile.mkdtemp(), **quiet
        ... )
        >>> data = FederatedDataModule("digits", partitioner=SizePartitioner([1, 2]))
        >>> module = partial(ClassifierClient, "softmax", optimizer=partial(torch.optim.SGD, lr=0.1))
        >>> retrain(trainer, module, data, seeds=1)["client_name"].tolist()
        ['0', '1']
    """
    _check(trainer)
    first = seed_or_default(find_loop(trainer).seed)
    data.prepare_data()
    data.setup("fit")
    masks = few_coalitions(data.num_clients, which)
    together, utilities = True, list[Tensor]()
    measure = judged_by(judges, performance_of("flsv.retrain", metric, mode, "metric"))
    given = module if isinstance(module, L.LightningModule) else None
    if line := all_take_part(find_loop(trainer)):
        rank_zero_info(f"flsv: {line}")
    if given is not None and seeds > 1:
        rank_zero_info(
            "flsv: the module starts from the same weights with all seeds. Give a function that "
            "makes it to draw new weights."
        )
    for seed in range(first, first + seeds):
        with _seeded(seed):
            own = module() if given is None else given  # type: ignore[operator]  # else it is a factory
            utility = _OfSpare(Spare(trainer, own), seed, own, data, measure)
            found = None
            if together:
                try:
                    found = SideBySideUtility(utility, seed, compare=not utilities)(masks)
                except NotSideBySide as error:
                    together = False
                    if which == "auto" and not utilities:
                        which = "both"
                        masks = few_coalitions(data.num_clients, which)
                    rank_zero_info(f"flsv: {len(masks) - 1} trainings follow, one after the other. Reason: {error}")
            utilities.append(utility(masks) if found is None else found)
    values, half = retrained_shapley(masks, torch.stack(utilities))
    total = float(values.clamp_min(0).sum()) or NAN
    shares = values * NAN if which in RANKING_ONLY else values.clamp_min(0) / total
    columns = {"value": values, "low": values - half, "high": values + half, "share": shares}
    names: Sequence[str] = data.client_names
    plain = {name: column.tolist() for name, column in columns.items()}
    return DataFrame({"client": range(len(names)), "client_name": names, **plain})


def _check(trainer: L.Trainer) -> None:
    """Raise ConfigurationError if a trainer has no FederatedLoop or has been fitted."""
    if not any(hasattr(each, "without_files") for each in callbacks_of(trainer)):
        raise ConfigurationError("flsv.retrain: the trainer has no FederatedLoop among its callbacks. Add one.")
    if trainer.current_epoch:
        raise ConfigurationError(
            f"flsv.retrain: this trainer has been fitted for {trainer.current_epoch} rounds, and its callbacks hold "
            "the results. Make a Trainer, a module and the data as for the fit, and give these."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all generators within this context as ``seed_everything`` does; then restore the random state."""
    before, held = global_rngs(), {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    L.seed_everything(seed, verbose=False)
    try:
        yield
    finally:
        restore_global_rngs(before)
        for name, value in held.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
