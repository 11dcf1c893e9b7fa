"""flsv.retrain: computes clients' values from runs with several seeds, each of which trains coalitions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from pandas import DataFrame
from torchmetrics import Metric

from flsv._lightning.patches import callbacks_of, find_loop
from flsv.configuration.federation_config import Reporting
from flsv.core import Values
from flsv.data import FederatedDataModule
from flsv.metrics.coalitions.design import WhichCoalitions, arguments_of_design
from flsv.metrics.shadow import ShadowShapley
from flsv.results.text import shares_in
from flsv.retraining.coalition_fit import (
    arguments_that_train,
    callbacks_that_train,
    write_into,
)
from flsv.retraining.copied_fits import CopyOfRun, fit_quietly, in_quiet
from flsv.retraining.price import max_fits_of_retraining
from flsv.scores.performance import Evaluators, Mode
from flsv.utilities.csv_files import NAN
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, check_lightning
from flsv.utilities.seeding import (
    global_rngs,
    kept_global_seed,
    restore_global_rngs,
    seed_or_default,
)
from flsv.values.query import mean_over_seeds

#: Default number of seeds.
NUM_SEEDS = 3
#: A number of rounds that no run reaches, so that values are only computed at the end of a run.
NEVER = 10**9


@checked
def retrain(
    trainer: L.Trainer,
    module: L.LightningModule | Callable[[], L.LightningModule],
    data: FederatedDataModule,
    coalitions: WhichCoalitions = "auto",
    *,
    metric: str | Metric = "accuracy",
    mode: Mode | None = None,
    seeds: Count = NUM_SEEDS,
    evaluators: Evaluators = "server",
    halvings: Count | None = None,
) -> DataFrame:
    """Compute clients' values by training the federation again with coalitions of them.

    Give a trainer, a module and data as for a fit that has not begun. Coalitions are trained by fits of copies of them,
    with three seeds. By default all coalitions are trained if they can be trained at once. Otherwise each client alone,
    all but one, and all are trained, and the values of other coalitions follow from predicted outputs, see
    :mod:`flsv.functional.shapley.predicted_outputs`, or from predicted scores if the performance is not computed from
    outputs.

    Args:
        trainer: a trainer with a :class:`flsv.FederatedLoop` among its callbacks.
        module: the module, or a function that makes the module. A function is called under each seed, as by ``flsv
            retrain``. A module starts from the same weights.
        data: the federation's data module, with a validation set for the server, or held-out samples at the clients.
        coalitions: name of the set of coalitions, see :func:`flsv.functional.few_coalitions`, a list of coalitions, a
            :class:`flsv.values.designs.Design`, or ``"halves"``, which are chosen by the outputs of the clients alone
            with each seed. ``"auto"``: the most accurate that cost no
            more than ``"both"``, one by one, with the first seed. The other seeds train the same.
        metric: the performance of a model: ``"accuracy"``, ``"negative_loss"``, ``"auroc"`` or another name of
            :mod:`flsv.scores.performance`, a name that the module logs, or a torchmetrics metric.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) logged value is better.
        evaluators: whose samples models are scored on, see :class:`flsv.metrics.ShadowShapley`.
        seeds: the number of trainings of every coalition, each with another seed. The first seed is the loop's seed, or
            the seed of ``seed_everything``.
        halvings: as in :class:`flsv.metrics.ShadowShapley`.

    Returns:
        A table with a row per client and the columns ``client``, ``client_name``, ``value`` (in the metric's unit),
        ``low_over_seeds`` and ``high_over_seeds`` (the ends of the value's 90 % interval over seeds alone), and
        ``share`` (NaN if values from these coalitions only allow a ranking).

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
    _check_is_new(trainer)
    data.prepare_data()
    data.setup("fit")
    max_fits = None
    if coalitions == "auto":
        max_fits = max_fits_of_retraining(loop.config.sampler, data.num_clients)
    make_game = partial(
        ShadowShapley,
        coalitions=coalitions,
        max_fits=max_fits,
        performance=metric,
        mode=mode,
        evaluators=evaluators,
        halvings=halvings,
        every=NEVER,
    )
    games = []
    first_seed = seed_or_default(loop.seed)
    for seed in range(first_seed, first_seed + seeds):
        with _seeded(seed):  # a function that creates the module draws its weights with this seed
            run_copy = CopyOfRun(trainer, module, data)
        games.append(_fit(run_copy, make_game(), seed))
        if coalitions == "auto":  # then the other seeds train what the first one has chosen
            design = arguments_of_design(games[0].latest_values.evidence or {})
            make_game = partial(make_game, **design)
    return _table_of_values(games, data)


def _check_is_new(trainer: L.Trainer) -> None:
    if trainer.current_epoch:
        raise ConfigurationError(
            f"flsv.retrain: this trainer has been fitted for {trainer.current_epoch} rounds, and its callbacks hold "
            "the results. Create a new Trainer, module and data module as for the fit, and pass these."
        )


def _table_of_values(games: list[ShadowShapley], data: FederatedDataModule) -> DataFrame:
    """Return the table of values, means over the ``games`` with one seed each. They are NaN for absent clients."""
    values_of_seeds = [_values_of(game) for game in games]
    estimates = mean_over_seeds(values_of_seeds)
    has_taken_part = torch.stack([game.participations.cpu() > 0 for game in games]).all(0)
    columns = estimates.columns()
    mean_values = estimates.value.where(has_taken_part, torch.nan).tolist()
    evidence = values_of_seeds[0].evidence
    assert evidence is not None  # the values are there
    ranks_only = evidence["ranks_only"]
    return DataFrame(
        {
            "client": range(data.num_clients),
            "client_name": data.client_names,
            "value": mean_values,
            "low_over_seeds": columns["low"].tolist(),
            "high_over_seeds": columns["high"].tolist(),
            "share": [NAN] * len(mean_values) if ranks_only else shares_in(mean_values),
        }
    )


def _values_of(game: ShadowShapley) -> Values:
    values = game.latest_values
    if values.missing is not None:
        raise ConfigurationError(values.missing)
    return values


def _fit(run_copy: CopyOfRun, game: ShadowShapley, seed: int) -> ShadowShapley:
    """Fit a copy of a run with ``game`` as its only metric, beside those that strategies read. Return the metric."""
    with in_quiet():
        # In a function of its own, after which nothing refers to the copy, so that it is freed here.
        metric, differences = _fit_copy(run_copy, game, seed)
    for difference in differences:
        warnings.warn(f"flsv.retrain, seed {seed}: {difference}.", stacklevel=2)
    return metric


def _fit_copy(
    run_copy: CopyOfRun, game: ShadowShapley, seed: int
) -> tuple[ShadowShapley, Sequence[str]]:
    """Return the metric of the fit, and how coalitions differ from the run."""
    with run_copy.folder.entered() as folder:
        trainer, module, data = run_copy.load()
        if not isinstance(module, L.LightningModule):  # a function that creates the module
            module = module()
        # Module and callbacks may read the best checkpoint, as in the run.
        trainer.callbacks = callbacks_that_train(trainer, keeps_checkpoints=True)
        write_into(folder, trainer)
        loop: Any = find_loop(callbacks_of(trainer))
        arguments = arguments_that_train(loop)
        arguments["metrics"]["value"] = game
        loop.set_arguments(
            **arguments,
            seed=seed,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        fit_quietly(trainer, module, data)
        return loop.metrics["value"], loop.run.coalition_differences


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators as ``seed_everything`` does, and restore them after this context."""
    generator_states = global_rngs()
    with kept_global_seed():
        L.seed_everything(seed, verbose=False)
        try:
            yield
        finally:
            restore_global_rngs(generator_states)
