"""Values of clients from coalitions trained with several seeds: :func:`flsv.retrain`, and what ``flsv retrain`` shares.

They differ only in where fits take place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from pandas import DataFrame
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.patches import callbacks_of, find_loop
from flsv.data import FederatedDataModule
from flsv.functional.intervals import interval_over_seeds, prediction_stderr, seed_covariance
from flsv.functional.shapley.few_coalitions import few_coalitions_shapley
from flsv.functional.shapley.halvings import choose_halvings
from flsv.functional.shapley.predicted_outputs import favors_nobody
from flsv.games.coalition_utility import Measure
from flsv.games.members import members_of
from flsv.metrics.coalitions.design import NO_OUTPUTS_FOR_HALVES, check_halvings, coalition_masks
from flsv.results.folder import (
    BY_SCORE,
    CASE_COVARIANCE,
    SEED_COVARIANCE,
)
from flsv.results.text import shares_in
from flsv.results.verdict import Source
from flsv.retraining.coalition_refusals import check_draws, sampler_of
from flsv.retraining.copied_fits import (
    UTILITY_NAME,
    CopiedFits,
    Predicted,
    Prediction,
    Scoring,
    copy_of_run,
)
from flsv.retraining.fit_order import FitOrder
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.utility_store import (
    COALITIONS_FILE,
    LAST_ROUND_KEY,
    UtilityStore,
    read_outputs,
    utilities_after_run,
)
from flsv.scores.performance import Judges, Mode, ModelScore, is_logged, judged_by, performance_of
from flsv.utilities.choices import Participation, Trainings
from flsv.utilities.csv_files import NAN, numbers_text
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, check_lightning
from flsv.utilities.run_copy import RunCopy
from flsv.utilities.seeding import global_rngs, restore_global_rngs, seed_or_default

#: Options of ``flsv retrain`` whose coalitions only rank the clients if outputs are not predicted.
RANKING_DESIGNS = ("singles", "leave-one-out")
#: Default number of seeds.
NUM_SEEDS = 3
#: The most clients of whose coalitions, if all are trained, the outputs are kept.
MAX_CLIENTS_WITH_OUTPUTS = 7


@checked
def retrain(
    trainer: L.Trainer,
    module: L.LightningModule | Callable[[], L.LightningModule],
    data: FederatedDataModule,
    coalitions: Trainings = "both",
    *,
    metric: str | Metric = "accuracy",
    mode: Mode | None = None,
    seeds: Count = NUM_SEEDS,
    judges: Judges = "server",
    participation: Participation = "drawn",
    jobs: Count = 1,
    halvings: Count = 1,
) -> DataFrame:
    """Compute clients' values by training the federation again with coalitions of them.

    Give a trainer, a module and data as for a fit that has not begun. Each coalition is trained by the fit of a copy of
    them. By default each client alone, all but one, and all are trained, with three seeds. The values of other
    coalitions follow from predicted outputs, see :mod:`flsv.functional.shapley.predicted_outputs`, or from predicted
    scores if the performance is not computed from outputs.

    Args:
        trainer: a trainer with a :class:`flsv.FederatedLoop` among its callbacks.
        module: the module, or a function that makes the module. A function is called under each seed, as by ``flsv
            retrain``. A module starts from the same weights.
        data: the federation's data module, with a validation set for the server, or held-out samples at the clients.
        coalitions: name of the set of coalitions, see :func:`flsv.functional.few_coalitions`, or ``"halves"``, which
            are chosen by the outputs of the clients alone with the first seed.
        metric: the performance of a model: ``"accuracy"``, ``"negative_loss"``, ``"auroc"`` or another name of
            :mod:`flsv.scores.performance`, a name that the module logs, or a torchmetrics metric.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) logged value is better.
        judges: whose samples models are scored on, see :class:`flsv.metrics.ShadowShapley`.
        participation: the clients that train if the loop has a sampler. With ``"drawn"`` each coalition draws its own
            cohorts among its members, with ``"all"`` all members train.
        seeds: the number of trainings of every coalition, each with another seed. The first seed is the loop's seed, or
            the seed of ``seed_everything``.
        jobs: the number of processes that train at once. 1: this process. A backend of ``joblib.parallel_config``, such
            as ``"dask"``, has its own number.
        halvings: as in :class:`flsv.metrics.ShadowShapley`.

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
    outputs = stored_outputs(coalitions, data.num_clients, measure, halvings)
    masks = coalition_masks(coalitions, data.num_clients)
    check_draws(sampler_of(loop, participation), masks)
    if isinstance(module, L.LightningModule) and seeds > 1:
        _say(
            "the module starts from the same weights with all seeds. Give a function that makes it to draw new weights"
        )

    def copy_of(seed: int) -> RunCopy:
        # Under the seed, since a factory draws weights by it.
        with _seeded(seed):
            return copy_of_run(trainer, module, data)

    fits = CopiedFits(copy_of, Scoring.by(measure, participation), jobs=jobs)
    training = CoalitionTraining(
        fits,
        FitOrder(members=(), seed=first_seed),
        num_samples=data.num_samples.tolist(),
    )
    store = UtilityStore(None, [UTILITY_NAME], outputs=outputs)
    retrained = train_seeds(
        training,
        data.client_names,
        design=coalitions,
        halvings=halvings,
        first_seed=first_seed,
        num_seeds=seeds,
        store=store,
        say=_say,
    )
    columns = {"client": range(data.num_clients), "client_name": data.client_names}
    return DataFrame(columns | retrained.values())


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
    generator_states = global_rngs()
    # seed_everything sets these variables, too.
    variables_before = {}
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        variables_before[name] = os.environ.get(name)
    L.seed_everything(seed, verbose=False)
    try:
        yield
    finally:
        restore_global_rngs(generator_states)
        for name, value in variables_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Retrained:
    """Utilities of coalitions that were trained with s seeds."""

    design: Trainings
    masks: Tensor
    seeds: list[int]
    # float64 [s, K, C], by C performance measures
    utilities: Tensor
    # None: the values follow from the utilities.
    predicted: Predicted | None = None

    @property
    def rank_only(self) -> bool:
        """Return whether values can only rank the clients, since their amounts are too inaccurate."""
        # The other coalitions would change the amounts by a third.
        return self.design in RANKING_DESIGNS and self.source == "scores"

    @property
    def source(self) -> Source:
        """Return where the utilities of all coalitions come from."""
        if len(self.masks) == 2 ** self.masks.shape[1]:
            return "trainings"
        return "scores" if self.predicted is None else "outputs"

    def values_by_seed(self, measure_index: int) -> tuple[Tensor, Tensor]:
        """Compute each seed's values ``[s, n]`` by one performance measure, and the standard error ``[n]`` of their
        mean that comes from coalitions that were not trained.
        """
        are_all_trained = len(self.masks) == 2 ** self.masks.shape[1]
        if self.predicted is None or are_all_trained:
            utilities = self.utilities[:, :, measure_index]  # [s, K]
            estimate = few_coalitions_shapley(self.masks, utilities.T)
            return estimate.values.T, estimate.stderr.mean(1)  # from [n, s]

        values = self.predicted.values[:, :, measure_index]  # [s, n]
        disagreement = self.predicted.disagreement[:, :, measure_index].mean(0)  # [n]
        return values, prediction_stderr(disagreement)

    def values(self, measure_index: int = 0) -> dict[str, list[float]]:
        """Compute clients' values, interval ends and shares by one performance measure, ``{column: [n]}``."""
        values_by_seed, stderr = self.values_by_seed(measure_index)  # [s, n] and [n]
        mean_values = values_by_seed.mean(0)
        half_widths = interval_over_seeds(values_by_seed, stderr)
        if self.rank_only:
            shares = [NAN] * len(mean_values)
        else:
            shares = shares_in(mean_values.tolist())
        return {
            "value": mean_values.tolist(),
            "low": (mean_values - half_widths).tolist(),
            "high": (mean_values + half_widths).tolist(),
            "share": shares,
        }

    def covariance_columns(self, measure_index: int) -> dict[str, list[str]]:
        """Return the rows of the values' covariances, ``{column: [n]}``, between seeds and between validation samples.
        Each is left out if it is not known.
        """
        values_by_seed, stderr = self.values_by_seed(measure_index)
        half_widths = interval_over_seeds(values_by_seed, stderr)
        # {column: covariance [n, n]}
        covariances = {SEED_COVARIANCE: seed_covariance(values_by_seed, half_widths)}
        if self.predicted is not None:
            covariances[CASE_COVARIANCE] = self.predicted.case_covariance[measure_index]

        texts_by_column = {}
        for name, covariance in covariances.items():
            if covariance.isfinite().all():
                texts_by_column[name] = [numbers_text(row) for row in covariance.tolist()]
        return texts_by_column

    def columns(
        self,
        names: Sequence[str],
        metric: str,
    ) -> dict[str, list[Any]]:
        """Return :meth:`values` by ``metric``, with their covariances, and columns of the shares by each other measure
        in ``names``.
        """
        measure_index = names.index(metric)
        columns: dict[str, list[Any]] = {**self.values(measure_index)}
        num_clients = self.masks.shape[1]  # masks [K, n]: the members of K coalitions
        utilities = self.utilities[:, :, measure_index].mean(0)  # [K], over seeds
        has_all_clients = self.masks.all(1)
        together = float(utilities[has_all_clients])
        columns["together"] = [together] * num_clients

        is_alone = self.masks.sum(1) == 1
        if is_alone.any():
            client_of_row = self.masks[is_alone].int().argmax(1)
            rows_by_client = client_of_row.argsort()
            utilities_alone = utilities[is_alone]
            columns["alone"] = utilities_alone[rows_by_client].tolist()
        columns["source"] = [self.source] * num_clients
        if self.rank_only:
            return columns

        columns.update(self.covariance_columns(measure_index))
        is_finite = self.utilities.isfinite().all(1).all(0)  # [C], by measure
        if len(names) > 1:
            for position, name in enumerate(names):
                if is_finite[position]:
                    columns[f"{BY_SCORE}{name}"] = self.values(position)["share"]
        return columns


def stored_outputs(
    coalitions: Trainings,
    num_clients: int,
    measure: Measure,
    halvings: int,
) -> Sequence[str]:
    """Return the name under which coalitions' outputs are stored. Empty if nothing is computed from them."""
    is_judged = isinstance(measure, ModelScore) and measure.judged
    check_halvings(coalitions, halvings, judges="clients" if is_judged else "server")
    names = _stored_outputs(coalition_masks(coalitions, num_clients), measure)
    if coalitions == "halves" and not names:
        raise ConfigurationError(f"flsv retrain: {NO_OUTPUTS_FOR_HALVES}")
    return names


def _stored_outputs(masks: Tensor, measure: Measure) -> Sequence[str]:
    # Other coalitions' outputs are predicted only from whole layers, and not many can be kept.
    num_clients = masks.shape[1]
    are_all_trained = len(masks) == 2**num_clients
    are_too_many = are_all_trained and num_clients > MAX_CLIENTS_WITH_OUTPUTS
    if are_too_many or not favors_nobody(masks):
        return ()
    if isinstance(measure, ModelScore) and not _has_outputs(measure, are_all_trained):
        return ()
    if isinstance(measure, str | ModelScore):
        return (UTILITY_NAME,)
    # The names of several measures, all of the same outputs, which are stored once, for the first.
    return measure[:1]


def _has_outputs(measure: ModelScore, are_all_trained: bool) -> bool:
    # Clients that judge models only have outputs to predict those of untrained coalitions.
    if measure.judged:
        return measure.by_class and not are_all_trained
    return not is_logged(measure)


def copy_from_run(
    store: UtilityStore,
    run_folder: Path,
    names: Sequence[str],
    output_names: Sequence[str],
    seeds: Iterable[int],
    num_rounds: int | None,
) -> None:
    """Copy from a run's folder into the store the utilities, by the measures ``names``, and outputs of coalitions that
    were trained at the run's end.
    """
    outputs_folder = run_folder / Path(COALITIONS_FILE).stem
    for seed in seeds:
        utilities_by_members = utilities_after_run(run_folder, names, seed, num_rounds)
        for members, utilities in utilities_by_members.items():
            if not store.missing(seed, [members]):
                continue
            outputs_of_run = read_outputs(outputs_folder, seed, members)  # {name: [rounds, ...]}
            # The store has the outputs of the last round only, by its own names.
            last_outputs = [outputs_of_rounds[-1:] for outputs_of_rounds in outputs_of_run.values()]
            outputs = dict(zip(output_names, last_outputs))
            row = [[utility] for utility in utilities]  # one number by each measure
            store.add(seed, members, rows={LAST_ROUND_KEY: row}, outputs=outputs)


def train_seeds(
    training: CoalitionTraining,
    client_names: Sequence[str],
    design: Trainings,
    halvings: int,
    first_seed: int,
    num_seeds: int | None,
    store: UtilityStore,
    say: Callable[[str], None] = lambda text: None,
) -> Retrained:
    """Train coalitions with the seeds ``first_seed``, ``first_seed + 1``, ..., and return their utilities.

    Coalitions in ``store`` are not trained again. Those that are trained are added to it, even if others fail.
    """
    if design == "auto":
        design = "both"
    masks = coalition_masks(design, training.num_clients)
    num_seeds = num_seeds or NUM_SEEDS
    seeds = list(range(first_seed, first_seed + num_seeds))
    training.train(members_of(masks), seeds, store, say)
    if design == "halves":
        outputs_alone = []
        for client in range(training.num_clients):
            last_outputs = store.last_outputs(first_seed, (client,))
            assert last_outputs is not None  # they are stored, or halves were refused
            outputs_alone.append(last_outputs)
        halves = choose_halvings(
            torch.stack(outputs_alone),
            client_names,
            halvings,
            logits=training.trainer.has_logits(first_seed, training.num_clients),
            seed=first_seed,
        )
        masks = torch.cat([masks, halves])
        training.train(members_of(masks), seeds, store, say)
    coalitions = members_of(masks)
    utilities = torch.stack([store.table(seed, masks) for seed in seeds])  # [s, K, C]

    not_empty = coalitions[1:]
    outputs = []
    for seed in seeds:
        for members in not_empty:
            last_outputs = store.last_outputs(seed, members)
            if last_outputs is not None:
                outputs.append(last_outputs)
    predicted = None
    are_complete = len(outputs) == len(seeds) * len(not_empty)
    if are_complete:
        outputs_by_seed = torch.stack(outputs).unflatten(0, (len(seeds), -1))  # [s, K - 1, ...]
        predicted = training.trainer.predict(
            Prediction(first_seed, masks, utilities, outputs_by_seed)
        )
    elif len(masks) < 2 ** masks.shape[1]:
        say(
            "the scores of coalitions that were not trained are estimated. Predicting their outputs comes closer, but "
            "it needs each client alone and whole sizes, and logged values have no outputs"
        )
    return Retrained(design, masks, seeds, utilities, predicted)
