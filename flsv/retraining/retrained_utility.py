"""RetrainedUtility: the coalition game that trains every coalition from scratch.

The baselines "Exact Shapley", "TMC Shapley" and "K-subset Shapley" of Guo et al. use this game, "A Fair Contribution
Measurement Method for Federated Learning", Sensors 24(15), 2024, after Ghorbani and Zou, "Data Shapley", ICML 2019. It
serves as the ground truth and is expensive: n clients require the training of 2^n - 1 federations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import ALONE, Ranks
from flsv.core.ranks import balance_load
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import Measure, utility_of
from flsv.games.members import EMPTY, Members, members_of
from flsv.games.module_copies import ModuleCopies
from flsv.games.vector_evaluator import METRICS, Scores, UtilityMetric
from flsv.retraining.coalition_fit import GlobalModelScoring, train_alone
from flsv.sampling import ClientSampler, FullParticipation
from flsv.scores.performance import Mode, ModelScore, performance_of, warn_of_rarity
from flsv.utilities.errors import ConfigurationError


class RetrainedUtility:
    """Utility that trains a federation of only the coalition's clients.

    It maps masks, bool ``[K, n]``, to utilities, float64 ``[K]``. Pass it to any estimator of :mod:`flsv.functional`:
    ``exact_shapley`` gives the exact value by retraining, ``permutation_shapley`` with a ``truncation`` TMC Shapley.
    Each coalition is trained once, and its final model scored on the server's
    validation set. All trainings start from the same weights: the module's or, if it is built only when training
    starts, the initial ones of the first training. Give the loop a seed, or coalitions differ by chance too. The empty
    coalition's model is the untrained module.

    Args:
        trainer: a function that makes a new trainer for a coalition, ``trainer(cohort)``, with
            ``FederatedLoop(sampler=cohort, seed=...)`` among its callbacks.
        module: the module, of which copies are trained. It is not changed itself.
        data: the federation's data, with a validation set for the server.
        metric: ``"accuracy"``, ``"balanced_accuracy"``, ``"negative_loss"``, or a list of C of these three names, which
            gives utilities ``[K, C]``. Also ``"per_class_accuracy"``, with utilities ``[K, M]`` for M classes,
            ``"auroc"`` or another name of :mod:`flsv.scores.performance`, a name that the module logs, or a
            torchmetrics metric.
        max_clients: the largest number of clients that is allowed.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        ranks: the processes among which the trainings are divided, such as
            ``flsv.engines.ranks.ranks_of_environment()``. Each of them calls the utility with the same masks, gets all
            scores, and runs one training at a time.
        sampler: the sampler of the whole federation, of which each coalition gets its own, see
            :meth:`flsv.sampling.ClientSampler.among`. None: all members of a coalition take part in every round.

    Attributes:
        num_players: n, the number of clients.
        ranks, sampler: the arguments of the same names.
        scores: ``{coalition: scores}`` of the coalitions trained so far, by the ascending tuple of their members.
        seconds: ``{coalition: seconds}``, how long each coalition's training took.
        initial: the ``state_dict`` from which all trainings start, or None as long as it is not known.
        model: ``[2, P]``, the model at the end of this process's last training, and the initial model, or None before a
            training.

    Raises:
        ConfigurationError: the metric is unknown, or there are more clients than ``max_clients``.

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
        trainer: Callable[[Any], L.Trainer],
        module: L.LightningModule,
        data: FederatedDataModule,
        metric: UtilityMetric | str | Metric | ModelScore | Sequence[str] = "accuracy",
        max_clients: int = 8,
        mode: Mode | None = None,
        ranks: Ranks = ALONE,
        sampler: ClientSampler | None = None,
    ) -> None:
        measure: Measure
        if isinstance(metric, Sequence) and (metric in METRICS or not isinstance(metric, str)):
            measure = metric
        else:
            measure = performance_of(self, metric, mode, "metric")
        data.prepare_data()
        data.setup("fit")
        if isinstance(measure, ModelScore):
            warn_of_rarity([measure], data)
        self._make_trainer = trainer
        self._module = ModuleCopies(module).load()
        self.data = data
        self.metric = measure
        self.num_players = data.num_clients
        self.ranks = ranks
        self.sampler = sampler or FullParticipation()
        self.initial: dict[str, Any] | None = None
        self.model: Tensor | None = None
        self.scores: dict[Members, Scores] = {}
        self.seconds: dict[Members, float] = {}
        if self.num_players > max_clients:
            raise ConfigurationError(
                f"RetrainedUtility: {self.num_players} clients make {2**self.num_players - 1:,} federations to train; "
                f"the limit is max_clients={max_clients}. Raise it, or value the clients without retraining, as "
                "flsv.metrics does."
            )

    def __call__(self, masks: Tensor) -> Tensor:
        """Train the new coalitions. Return all utilities, ``[K]``, or ``[K, M]`` for M classes or names."""
        if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != self.num_players:
            raise ValueError(
                f"expected masks bool [K, {self.num_players}], got {masks.dtype} {list(masks.shape)}."
            )
        coalitions = members_of(masks.cpu())
        distinct_coalitions = dict.fromkeys(coalitions)
        missing = [members for members in distinct_coalitions if members not in self.scores]
        coalitions_to_train = [members for members in missing if members]
        if missing and not coalitions_to_train:
            # The empty coalition's model is the initial one of any training.
            coalitions_to_train = [(0,)]
        self._train_all(coalitions_to_train)

        utilities = [utility_of(self.scores[members], self.metric) for members in coalitions]
        return torch.cat(utilities)

    def _train_all(self, coalitions: list[Members]) -> None:
        ranks = self.ranks
        remaining_coalitions = coalitions
        if self.initial is None and ranks.size > 1 and coalitions:
            # All trainings start from the first one's initial weights.
            if ranks.rank == 0:
                self._train(coalitions[0])
            self._exchange(coalitions[:1], "the first coalition's training")
            remaining_coalitions = coalitions[1:]

        # A training costs as much as its members have samples.
        costs = []
        for members in remaining_coalitions:
            samples = self.data.num_samples[list(members)]
            costs.append(float(samples.sum()))
        rank_of_coalition = balance_load(costs, ranks.size)
        for members, rank in zip(remaining_coalitions, rank_of_coalition):
            if rank == ranks.rank:
                self._train(members)
        if ranks.size > 1:
            self._exchange(remaining_coalitions, "coalitions' trainings")

    def _exchange(self, coalitions: list[Members], exchange_name: str) -> None:
        scores = {}
        seconds = {}
        for members in ((), *coalitions):
            if members in self.scores:
                scores[members] = self.scores[members]
            if members in self.seconds:
                seconds[members] = self.seconds[members]
        initial = None  # all ranks take the initial weights of rank 0
        if self.ranks.rank == 0:
            initial = self.initial

        results = self.ranks.all_gather((scores, seconds, initial), exchange_name)
        _, _, self.initial = results[0]
        for scores_of_rank, seconds_of_rank, _ in results:
            self.scores.update(scores_of_rank)
            self.seconds.update(seconds_of_rank)

    def _train(self, members: Members) -> None:
        trainer = self._make_trainer(self.sampler.among(members))
        module = ModuleCopies(self._module).load()
        has_untrained_score = EMPTY in self.scores
        scoring = GlobalModelScoring(
            self.data,
            measures=[self.metric],
            initial_state=self.initial,
            scores_untrained=not has_untrained_score,
        )

        with self.data.counting(members):
            seconds = train_alone(
                trainer,
                module,
                data=self.data,
                scoring=scoring,
            )

        self.seconds[members] = seconds
        # Each list has the scores by the one measure.
        if scoring.untrained_scores:
            (self.scores[EMPTY],) = scoring.untrained_scores
        assert scoring.scored_round is not None
        (self.scores[members],) = scoring.scores_by_round[scoring.scored_round]
        self.initial = scoring.initial_state
        self.model = scoring.models
