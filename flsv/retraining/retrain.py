"""retrain: computes clients' values by retraining, like ``flsv retrain``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from pandas import DataFrame
from torchmetrics import Metric

from flsv._lightning.patches import callbacks_of
from flsv.core import find_loop
from flsv.data import FederatedDataModule
from flsv.functional.shapley.few_coalitions import Which, few_coalitions
from flsv.games.coalition_utility import Measure
from flsv.games.performance import Judges, Mode, judged_by, performance_of
from flsv.retraining.coalition_refusals import check_draws, sampler_of
from flsv.retraining.fit_order import FitOrder
from flsv.retraining.fits_in_processes import (
    UTILITY,
    Federation,
    FitsInProcesses,
    Prediction,
    work_on,
)
from flsv.retraining.fresh_fits import pickled_fit, unpickled_fit
from flsv.retraining.retrained_values import SEEDS, stored_outputs, train_seeds
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.utility_store import UtilityStore
from flsv.utilities.choices import Participation
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, check_lightning
from flsv.utilities.forks import cores, why_not_fork
from flsv.utilities.own_files import own_folder
from flsv.utilities.seeding import global_rngs, restore_global_rngs, seed_or_default
from flsv.utilities.supervisor import ForksOrFresh, by_workers, supervise_by_joblib, supervise_fresh


@checked
def retrain(
    trainer: L.Trainer,
    module: L.LightningModule | Callable[[], L.LightningModule],
    data: FederatedDataModule,
    coalitions: Which = "both",
    *,
    metric: str | Metric = "accuracy",
    mode: Mode | None = None,
    seeds: Count = SEEDS,
    judges: Judges = "server",
    participation: Participation = "drawn",
    jobs: Count | None = None,
) -> DataFrame:
    """Compute clients' values by training the federation again with coalitions of them.

    Give a trainer, a module and data as for a fit that has not begun. None of them is changed. Each coalition is
    trained by a fit of its own in a fork of this process, with its own module, callbacks and data. By default each
    client alone, all but one, and all are trained, with three seeds. The values of other coalitions follow from
    predicted outputs, see :mod:`flsv.functional.shapley.predicted_outputs`, or from predicted scores if the performance
    is not computed from outputs.

    A process cannot be forked outside Linux, with a trainer on an accelerator, after a training on a machine that has
    one, or with other threads. Fresh processes then train from what can be pickled, and a line says so. So do the
    workers of the backend of ``joblib.parallel_config``, such as ``"dask"``, if one is set.

    Args:
        trainer: a trainer with a :class:`flsv.FederatedLoop` among its callbacks.
        module: the module, or a function that makes the module. A function is called under each seed, so that the
            initial weights are drawn anew, as ``flsv retrain`` does. A module starts from the same weights under all
            seeds, so that most of the random variation is not seen.
        data: the federation's data module, with a validation set for the server, or held-out samples at the clients.
        coalitions: name of the set of coalitions, see :func:`flsv.functional.few_coalitions`. With ``"all"`` the values
            are exact for these trainings.
        metric: the performance of a model, see :class:`flsv.retraining.RetrainedUtility`.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) logged value is better.
        judges: whose samples models are scored on, see :class:`flsv.metrics.ShadowShapley`.
        participation: the clients that train if the loop has a sampler. With ``"drawn"`` each coalition draws its own
            cohorts among its members, as many clients as the run draws. With ``"all"`` all members train in every
            round.
        seeds: the number of trainings of every coalition, each with another seed. The first seed is the loop's seed, or
            the seed of ``seed_everything``.
        jobs: the number of processes that train at once. None: the number of cores, or 1 on an accelerator. A
            backend of ``joblib`` has its own number.

    Returns:
        A table with a row per client and the columns ``client``, ``client_name``, ``value`` (in the metric's unit),
        ``low`` and ``high`` (the ends of the value's 90 % interval), and ``share`` (NaN if values from these coalitions
        only allow a ranking).

    Raises:
        ConfigurationError: the trainer has been fitted or has no FederatedLoop, or an argument is out of range or does
            not fit the federation.

    Example:
        >>> import tempfile
        >>> import torch
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
    check_lightning(trainer, module)
    loop = find_loop(callbacks_of(trainer))
    _check(trainer)
    first_seed = seed_or_default(loop.seed)
    data.prepare_data()
    data.setup("fit")
    measure = judged_by(judges, performance_of("flsv.retrain", metric, mode, "metric"))
    masks = few_coalitions(data.num_clients, coalitions)
    check_draws(sampler_of(loop, participation), masks)
    if isinstance(module, L.LightningModule) and seeds > 1:
        _say(
            "the module starts from the same weights with all seeds. Give a function that makes it to draw new weights"
        )

    device = trainer.strategy.root_device
    no_fork = why_not_fork(device)
    if jobs is None:
        jobs = cores() if no_fork is None or device.type == "cpu" else 1
    run: Any
    if by_workers():
        run = supervise_by_joblib
    elif no_fork:
        _say(f"coalitions are trained in fresh processes: {no_fork}")
        run = partial(supervise_fresh, forks=device.type != "cuda")
    else:
        run = ForksOrFresh(_say)

    work = partial(_work, _Parts(trainer, module, data), measure, participation)
    processes = FitsInProcesses(lambda request: partial(work, request), jobs, run=run)
    training = CoalitionTraining(
        processes,
        FitOrder(members=(), seed=first_seed),
        num_samples=data.num_samples.tolist(),
    )
    store = UtilityStore(None, [UTILITY], outputs=stored_outputs(masks, measure))
    retrained = train_seeds(
        training,
        processes.predict,
        design=coalitions,
        first_seed=first_seed,
        num_seeds=seeds,
        store=store,
        say=_say,
    )
    columns = {"client": range(data.num_clients), "client_name": data.client_names}
    return DataFrame(columns | retrained.values())


def _work(
    make_parts: Callable[[], tuple[Any, Any, Any]],
    measure: Measure,
    participation: Participation,
    request: FitOrder | Prediction,
) -> Any:
    with _seeded(request.seed), own_folder() as folder:
        trainer, module, data = make_parts()
        if not isinstance(module, L.LightningModule):
            module = module()
        federation = Federation(trainer, module, data, measure, participation)
        return work_on(request, federation, str(folder))


class _Parts:
    """Callable that returns a trainer, a module and data, pickled together for a new process."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    @cached_property
    def _pickled(self) -> bytes:
        try:
            return pickled_fit(*self._parts)
        except Exception as error:
            error.add_note(
                "flsv: fresh processes train coalitions here, from the trainer, module and data, pickled"
            )
            raise

    def __reduce__(self) -> Any:
        return partial, (unpickled_fit, self._pickled)

    def __call__(self) -> Any:
        return self._parts


def _say(text: str) -> None:
    rank_zero_info(f"flsv: {text}")


def _check(trainer: L.Trainer) -> None:
    if trainer.current_epoch:
        raise ConfigurationError(
            f"flsv.retrain: this trainer has been fitted for {trainer.current_epoch} rounds, and its callbacks hold "
            "the results. Make a Trainer, a module and the data as for the fit, and give these."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators as ``seed_everything`` does, and restore them after this context."""
    states = global_rngs()
    variables = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    L.seed_everything(seed, verbose=False)
    try:
        yield
    finally:
        restore_global_rngs(states)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
