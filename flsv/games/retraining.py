"""KeptUtility: keeps a game's utilities on disk, for coalitions that take minutes to train.

RetrainedUtility: the coalition game that trains every coalition from scratch.

The game of the baselines "Exact Shapley", "TMC Shapley" and "K-subset Shapley" of Guo et al., "A Fair Contribution
Measurement Method for Federated Learning", Sensors 24(15), 2024, after Ghorbani and Zou, "Data Shapley", ICML 2019. It
is a yardstick: n clients make 2^n - 1 federations to train.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.patches import callbacks_of
from flsv.core import ALONE, Ranks
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import longest_first
from flsv.data import FederatedDataModule
from flsv.functional.shapley.game import Utility
from flsv.games.coalition import Measure, utility_of
from flsv.games.evaluator import ModelEvaluator
from flsv.games.evaluators import evaluators_of
from flsv.games.performance import Mode, ModelScore, performance_of
from flsv.games.replica import VectorEvaluator, copied
from flsv.games.scores import METRICS, Scores, UtilityMetric
from flsv.sampling.fixed_cohort import FixedCohort
from flsv.utilities.csv_files import Cell, number, whole
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import Kept, members_text, read_members

Members = tuple[int, ...]
#: Of the file of a game, beside the utilities, and how they are read.
COALITION: Mapping[str, Cell] = {"seed": whole, "coalition": read_members}
COLUMNS: Mapping[str, Cell] = {**COALITION, "utility": number}


def members_of(masks: Tensor) -> list[Members]:
    """Members of each coalition of bool ``[K, n]``, ascending."""
    return [tuple(mask.nonzero().flatten().tolist()) for mask in masks]


class KeptUtility:
    """``utility(masks: bool [K, n]) -> float64 [K]`` (or ``[K, C]``): reads known utilities from a file and asks
    another utility for the rest.

    So many coalitions are asked for at a time, and what they came to is written before the next ones: a killed process
    loses no more than those.

    Args:
        utility: the game, such as a :class:`flsv.games.RetrainedUtility`.
        path: of the file, see :class:`flsv.utilities.result_file.Kept`.
        settings: what the answers hang on, but for the seed. A file of other settings is refused.
        ranks: those of ``utility``: all of them ask alike, the first one writes.
        told: called with how many coalitions are known and how many were asked for, after every answer.
        at_once: coalitions that are asked for at a time. Default: as many as there are ranks.
        seed: of the trainings; a file may hold those of several.
        names: of the utility's C columns.
        known: utilities by column that are known from elsewhere, by members.

    Attributes:
        known: members to the utilities by column.

    Raises:
        ConfigurationError: the file is one of other settings or players, or none of this kind.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> masks = torch.tensor([[True, False], [True, True]])
        >>> KeptUtility(lambda masks: masks.sum(1).double(), path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
        >>> KeptUtility(lambda masks: masks.sum(1) / 0, path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(
        self,
        utility: Utility,
        path: Path,
        settings: Mapping[str, Any],
        ranks: Ranks = ALONE,
        told: Callable[[int, int], None] = lambda done, of: None,
        at_once: int | None = None,
        seed: int = 0,
        names: Sequence[str] = ("utility",),
        known: Mapping[Members, list[float]] | None = None,
    ) -> None:
        self._at_once, self._seed, self._width = at_once or ranks.size, seed, len(names)
        self._utility, self._ranks, self._told = utility, ranks, told
        columns = {**COALITION, **dict.fromkeys(names, number)}
        self._kept = Kept(path, columns, settings) if ranks.rank == 0 else None
        rows = [] if self._kept is None else self._kept.rows
        mine = {row["coalition"]: [row[name] for name in names] for row in rows if row["seed"] == seed}
        self.known: dict[Members, list[float]] = ranks.from_rank(
            0, dict(known or {}) | mine, "the trainings that are kept"
        )

    def __call__(self, masks: Tensor) -> Tensor:
        """float64 ``[K]``, or ``[K, C]`` of several columns. What is not finite is told and not kept.

        Raises:
            ConfigurationError: the file has trainings of players that there are not.
        """
        coalitions = members_of(masks)
        first = {members: i for i, members in reversed(list(enumerate(coalitions)))}
        missing = sorted(i for members, i in first.items() if members not in self.known)
        for start in range(0, len(missing), self._at_once):
            rows = missing[start : start + self._at_once]
            values = self._utility(masks[rows]).detach().double().view(len(rows), self._width).tolist()
            new = dict(zip([coalitions[i] for i in rows], values))
            self.known |= new
            if self._kept is not None:
                finite = {members: of for members, of in new.items() if all(map(math.isfinite, of))}
                self._kept.add([self._seed, members_text(members), *of] for members, of in finite.items())
            self._told(len(first) - len(missing) + start + len(rows), len(first))
        found = torch.tensor([self.known[members] for members in coalitions], dtype=torch.float64)
        return found if self._width > 1 else found[:, 0]


class RetrainedUtility:
    """``utility(masks: bool [K, n]) -> float64 [K]``: trains the federation with only these clients and evaluates its
    model.

    Play it with any estimator of :mod:`flsv.functional`: ``exact_shapley`` is the exact value by retraining,
    ``permutation_shapley`` with a ``truncation`` TMC, ``stratified_shapley`` K-subset. A coalition is trained once,
    whoever asks. All start from the same weights: the module's as they are now or, where it is built only when training
    starts, those that the first training makes. Give the loop a seed, or coalitions differ by chance too. The empty
    coalition is the untrained module. Models are measured on the server's validation set, as in the games of a round.

    Args:
        trainer: makes a new trainer for a cohort: ``FederatedLoop(sampler=cohort, seed=...)`` among its callbacks.
        module: trained in copies; it is not changed itself.
        data: the federation's data, with a validation set for the server.
        metric: ``"accuracy"``, ``"balanced_accuracy"``, ``"negative_loss"``, ``"per_class_accuracy"`` (then the
            utility is ``[K, M]``), ``"auroc"`` and what else :mod:`flsv.games.performance` lists, a name that the
            module logs, or a torchmetrics metric. Several of the first three make the utility ``[K, C]``.
        max_clients: the most clients for which such a game may be begun.
        mode: whether less or more of a logged value is better, likewise.
        ranks: processes that share the trainings out, such as ``flsv.engines.ranks.ranks_of_environment()``; each of
            them calls the utility alike, and knows all scores. A training is one process's.

    Attributes:
        num_players: n.
        ranks: as given.
        scores: coalition (its members, ascending) to its model's scores, for all that are known.
        seconds: coalition to how long its training took.
        initial: the module's ``state_dict`` that all start from; None before the first training.
        model: ``[2, P]``, what the last training in this process has come to, and what it started from; None before.

    Raises:
        ConfigurationError: another metric, or more clients than ``max_clients``.

    Example:
        >>> import tempfile
        >>> from functools import partial
        >>> from flsv import ClassifierClient, FederatedLoop, Reporting
        >>> from flsv.data import SizePartitioner
        >>> from flsv.functional import exact_shapley
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> quiet["default_root_dir"] = tempfile.mkdtemp()
        >>> def trainer(cohort):
        ...     loop = FederatedLoop(sampler=cohort, seed=0, reporting=Reporting(table=False))
        ...     return L.Trainer(max_epochs=1, callbacks=[loop], enable_checkpointing=False, **quiet)
        >>> data = FederatedDataModule("digits", partitioner=SizePartitioner([1, 2]))
        >>> module = ClassifierClient("softmax", optimizer=partial(torch.optim.SGD, lr=0.1))
        >>> utility = RetrainedUtility(trainer, module, data)
        >>> exact_shapley(utility, utility.num_players).values.shape, len(utility.seconds)
        (torch.Size([2]), 3)
    """

    def __init__(
        self,
        trainer: Callable[[FixedCohort], L.Trainer],
        module: L.LightningModule,
        data: FederatedDataModule,
        metric: UtilityMetric | str | Metric | Sequence[str] = "accuracy",
        max_clients: int = 8,
        mode: Mode | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        measure: Measure
        if isinstance(metric, Sequence) and (metric in METRICS or not isinstance(metric, str)):
            measure = metric
        else:
            measure = performance_of(self, metric, mode, "metric")
        data.prepare_data()
        data.setup("fit")
        if data.num_clients > max_clients:
            raise ConfigurationError(
                f"RetrainedUtility: {data.num_clients} clients make {2**data.num_clients - 1:,} federations to train; "
                f"the limit is max_clients={max_clients}. Raise it, or value the clients without retraining, as "
                "flsv.metrics does."
            )
        self.trainer, self.module, self.data, self.metric = trainer, copied(module), data, measure
        self.num_players = data.num_clients
        self.ranks = ranks
        self.initial: dict[str, Any] | None = None
        self.model: Tensor | None = None
        self.scores: dict[Members, Scores] = {}
        self.seconds: dict[Members, float] = {}

    def __call__(self, masks: Tensor) -> Tensor:
        """float64 ``[K]`` (or ``[K, M]``); coalitions that are not known yet are trained.

        Raises:
            ValueError: masks of another type or shape.
        """
        if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != self.num_players:
            raise ValueError(f"expected masks bool [K, {self.num_players}], got {masks.dtype} {list(masks.shape)}.")
        coalitions = members_of(masks.cpu())
        wanted = dict.fromkeys(members for members in coalitions if members and members not in self.scores)
        if () in coalitions and () not in self.scores and not wanted:
            wanted[(0,)] = None  # the empty coalition's model is what any training starts from
        self._train_all(list(wanted))
        return torch.cat([utility_of(self.scores[members], self.metric) for members in coalitions])

    def _train_all(self, coalitions: list[Members]) -> None:
        ranks = self.ranks
        if self.initial is None and ranks.size > 1 and coalitions:
            # What the first training starts from, all others do.
            if ranks.rank == 0:
                self._train(coalitions[0])
            self._share(coalitions[:1], "the first coalition's training")
            coalitions = coalitions[1:]
        samples = self.data.num_samples
        owners = longest_first([float(samples[list(members)].sum()) for members in coalitions], ranks.size)
        for members, owner in zip(coalitions, owners):
            if owner == ranks.rank:
                self._train(members)
        if ranks.size > 1:
            self._share(coalitions, "coalitions' trainings")

    def _share(self, coalitions: list[Members], about: str) -> None:
        """Everybody's scores of these coalitions and of the empty one."""
        names = ((), *coalitions)
        own = {members: self.scores[members] for members in names if members in self.scores}
        seconds = {members: self.seconds[members] for members in coalitions if members in self.seconds}
        parts = self.ranks.everybody((own, seconds, self.initial if self.ranks.rank == 0 else None), about)
        self.initial = parts[0][2]
        for scores, spent, _ in parts:
            self.scores |= scores
            self.seconds |= spent

    def _made(self, members: Members) -> tuple[L.Trainer, L.LightningModule]:
        return self.trainer(FixedCohort(members)), copied(self.module)

    def _train(self, members: Members) -> None:
        trainer, module = self._made(members)
        measured = Measured(self.data, [self.metric], self.initial)
        self.seconds[members] = train_alone(trainer, module, self.data, measured)
        (self.scores[()],), ((self.scores[members],),) = measured.before, measured.after.values()
        self.initial, self.model = measured.initial, measured.models


def train_alone(trainer: L.Trainer, module: L.LightningModule, data: FederatedDataModule, measured: Measured) -> float:
    """Fit a coalition's federation, which writes no files.

    Returns:
        Seconds, without those of the evaluations.

    Raises:
        RuntimeError: the trainer trained nothing.
    """
    callbacks: list[Any] = callbacks_of(trainer)
    # One folder, hundreds of fits.
    callbacks[:] = [measured, *(c.without_files() if hasattr(c, "without_files") else c for c in callbacks)]
    start = time.perf_counter()
    trainer.fit(module, data)
    if measured.last is None:
        raise RuntimeError("a trainer made for a coalition trained nothing: is its max_epochs 0?")
    return time.perf_counter() - start - measured.seconds


class Measured(L.Callback):
    """Gives the module its initial weights, or remembers them, and scores the global model before the first round and
    after some.

    Args:
        data: with a validation set for the server.
        measures: what models are measured by, see :class:`RetrainedUtility`.
        initial: the module's ``state_dict`` to start from; None: as it is.
        rounds: after which the model is scored, from 0, ascending; training ends with the last. None: after training.

    Attributes:
        before: the scores before the first round, by measure.
        after: round to the scores after it, by measure.
        last: the last round that was scored; None: training has not ended.
        models: ``[2, P]``, what training came to, and what it started from.
        seconds: that the evaluations took.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        measures: Sequence[Measure],
        initial: dict[str, Any] | None,
        rounds: Sequence[int] | None = None,
    ) -> None:
        self._data, self._measures, self.initial, self._rounds = data, measures, initial, rounds
        self.before: list[Scores] = []
        self.after: dict[int, list[Scores]] = {}
        self.last: int | None = None
        self.models = torch.empty(0)
        self.seconds = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.initial is None:
            self.initial = copy.deepcopy(pl_module.state_dict())
        else:
            pl_module.load_state_dict(self.initial)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        callback: Any  # a loop, which stands above this
        for callback in callbacks_of(trainer):
            if getattr(callback, "share", "all") != "all" and callback.space.private_names:
                raise ConfigurationError(
                    f"RetrainedUtility evaluates the global model, and with share={callback.share!r} a part of it "
                    "stays at the clients. Share all of it."
                )
        start = time.perf_counter()
        self._space = ParameterSpace(pl_module)
        self._evaluators = [evaluator_of(trainer, self._space, self._data, each) for each in self._measures]
        self.models = self._space.read(pl_module).expand(2, -1).clone()
        self.before = [evaluate(self.models[1:].clone()) for evaluate in self._evaluators]
        self.seconds += time.perf_counter() - start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._rounds is None or trainer.current_epoch not in self._rounds:
            return
        self._score(pl_module, trainer.current_epoch)
        if trainer.current_epoch == self._rounds[-1]:
            trainer.should_stop, trainer.fit_loop.min_epochs = True, 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._rounds is None:
            self._score(pl_module, trainer.current_epoch - 1)

    def _score(self, module: L.LightningModule, index: int) -> None:
        # Clones: a forward pass may change weights, as an embedding's with max_norm does.
        start = time.perf_counter()
        self.models[0] = self._space.read(module)
        self.after[index] = [evaluate(self.models[:1].clone()) for evaluate in self._evaluators]
        self.last = index
        self.seconds += time.perf_counter() - start


def evaluator_of(
    trainer: L.Trainer, space: ParameterSpace, data: FederatedDataModule, measure: Measure
) -> VectorEvaluator:
    """Evaluates models ``[K, P]`` on the server's validation set.

    Args:
        trainer: with its module on its device.
        space: the map between models and vectors.
        data: with a validation set.
        measure: what a model is worth, see :class:`RetrainedUtility`.
    """
    if isinstance(measure, ModelScore):
        return evaluators_of(trainer, space, data.val_dataloader(), {"the utility": measure})[measure.evaluator]
    return ModelEvaluator(
        trainer.lightning_module,
        space,
        all_on_device(trainer, data.val_dataloader()),
        num_classes=data.num_classes,
        context=trainer.strategy.precision_plugin.forward_context,
    )
