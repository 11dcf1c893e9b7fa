"""CoalitionPlan: decides how to train the models of the coalitions that metrics need.

If training as rows of one batched model gives the same models as a separate run of each coalition, the coalitions are
trained during the federation's fit (:mod:`flsv.retraining.shadow`); otherwise after it, each by a fit of its own
(:mod:`flsv.retraining.whole_fits`). The decision is made, and shown, before the first round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.rounding import rounding_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.games.copy_module import copy_module
from flsv.games.untrained import untrained_models
from flsv.metrics.coalitions.designs import Coalitions, coalition_masks, design_within
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.after_the_run import AfterTheRun, EndedRun, NotCompared, measures_of, row_disproved
from flsv.retraining.coalition_fit import FitOrder
from flsv.retraining.coalition_refusals import check_settings, check_shared, mean_cohort
from flsv.retraining.coalition_words import HowTrained
from flsv.retraining.drawn_coalitions import DrawnCoalitions
from flsv.retraining.forked_fits import why_not_by_forks
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.shadow import Ends, Prove, ShadowTraining, not_as_rows
from flsv.sampling import FullParticipation
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from flsv.utilities.supervisor import ChildFailed, supervise


class CoalitionPlan:
    """Plan of a loop for training the coalitions that its metrics need: during the run as rows of one batched model, or
    after the run by separate fits.

    Args:
        metrics: the metrics that need trained coalitions, by name, see :attr:`flsv.metrics.ShadowShapley.trains`.

    Attributes:
        why: the reason why coalitions are trained after the run. None if they are trained during the run, or if this is
            not decided yet.

    Raises:
        ConfigurationError: the metrics need different coalitions.
    """

    def __init__(self, metrics: Mapping[str, ShadowShapley]) -> None:
        self._metrics = dict(metrics)
        wanted = [metric.trains for metric in metrics.values()]
        self._coalitions: Coalitions = wanted[0] if wanted else ()
        self._max_fits = min((metric.max_fits for metric in metrics.values()), default=0.0)
        if any(each != self._coalitions for each in wanted):
            raise ConfigurationError(
                f"metrics {list(metrics)} need different coalitions, but a run trains one set. Give them the same "
                "coalitions, or leave out all but one."
            )
        self._kept = KeptBeginning()
        self.reset()

    @classmethod
    def of(cls, config: FederationConfig) -> CoalitionPlan:
        """Make the plan for a loop's metrics; without a metric that needs trained coalitions the plan does nothing.

        Args:
            config: the loop's configuration.

        Raises:
            ConfigurationError: the metrics need different coalitions, or a setting of the federation allows neither way
                of training them.
        """
        asking: Any = {
            name: metric for name, metric in config.metrics.items() if attribute_of(metric, "trains") is not None
        }
        if asking:
            check_settings(config)
        return cls(asking)

    def reset(self) -> None:
        """Forget the decision and the coalitions' models of an earlier fit."""
        self.why: str | None = None
        self._decided = False
        self.close()
        self._kept = KeptBeginning()
        self._initial: dict[str, Any] | None = None
        self._rows: ShadowTraining | DrawnCoalitions | None = None
        self._seed, self._proved, self._unproved = 0, False, False
        self._cohort: float | None = None
        self._drawn: Callable[..., DrawnCoalitions] | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_drawn": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: the decision, the initial weights and the coalitions' models."""
        rows = self._loaded if self._rows is None else self._rows.state_dict()
        return {"why": self.why, "initial": self._initial, "rows": rows if self.why is None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.why, self._initial, self._loaded, self._decided = state["why"], state["initial"], state["rows"], True

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Keep the state before the fit, so that coalitions can be trained from it after the fit: by a fork of this
        process or, if that is impossible, by copies of the Trainer and the module.

        Returns:
            False in the run's own process. True in a process that was forked later to train a coalition, and whose
            Trainer has become the coalition's.
        """
        if self._kept or not self._metrics:
            return False
        return self._kept.keep(trainer, module, measures_of(self._metrics.values()))

    def close(self) -> None:
        """End the forked process that keeps the fit's beginning, if there is one."""
        self._kept.close()

    def decide(
        self, trainer: L.Trainer, data: FederatedDataModule, config: FederationConfig, limit: float = 1.0
    ) -> FederationConfig:
        """Decide how coalitions are trained, and show the decision.

        Args:
            trainer: the trainer, with its module on its device.
            data: the data module, with its samples assigned to clients.
            config: the federation's configuration.
            limit: Lightning's ``limit_train_batches``, per client and local epoch.

        Returns:
            The configuration to train with: ``config``, or a copy with a client algorithm that also trains the
            coalitions' models.

        Raises:
            ConfigurationError: the federation allows neither way of training coalitions.
        """
        if not self._metrics:
            return config
        check_shared(config, trainer.lightning_module)
        self._seed = config.seed or 0
        self._cohort = mean_cohort(config.sampler, self.masks, data.num_clients)
        if not self._decided:
            why_not = self._why_not_rows(trainer, config)
            self.why = ranks_of(trainer).broadcast(0, why_not, "how coalitions are trained")
            self._decided = True
            self._initial = copy.deepcopy(trainer.lightning_module.state_dict())
        for metric in self._metrics.values():
            metric.await_training(after_the_run=self.why is not None)
            metric.averages = not isinstance(config.sampler, FullParticipation)
        if self.why is None:
            return self._with_rows(trainer, config, data.num_clients, limit)
        self._check_kept(callable(config.engine))
        rank_zero_info(f"flsv: {self._how(data.num_clients).planned()}.")
        return config

    def _with_rows(
        self, trainer: L.Trainer, config: FederationConfig, num_clients: int, limit: float
    ) -> FederationConfig:
        """Return the configuration with which coalitions are trained during the run.

        If they can be trained after the run, too, an error of the rows during the run changes the decision to that.
        """
        give_up, prove = None, None
        if not callable(config.engine) and ranks_of(trainer).size == 1 and self._kept:
            give_up, prove = partial(self._give_up, num_clients), partial(self._prove, trainer, False)
        else:
            self._kept.forget()
        full = isinstance(config.sampler, FullParticipation)
        if not full:
            self._drawn = partial(
                DrawnCoalitions, trainer, limit=limit, saved=self._loaded, give_up=give_up, prove=prove
            )
        rank_zero_info(f"flsv: {self._how(num_clients).planned()}.")
        return self.as_rows(config, give_up, prove) if full else config

    def _check_kept(self, elsewhere: bool) -> None:
        """Check that coalitions can be trained after the run.

        Args:
            elsewhere: whether the clients' data are on other machines.

        Raises:
            ConfigurationError: they cannot.
        """
        if elsewhere:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}; and the clients' data are not on this machine, so that no coalition can "
                "be trained after the run. Leave ShadowShapley out, and use flsv retrain where all data are."
            )
        if not self._kept:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}. To train coalitions after the run, the Trainer, its callbacks and the "
                f"module are copied before it, since {self._kept.no_fork}; and one of them cannot be copied "
                f"({self._kept.no_copy}). Leave that out, or leave ShadowShapley out."
            )

    def _why_not_rows(self, trainer: L.Trainer, config: FederationConfig) -> str | None:
        """Try on a few batches, if possible in a fork, whether coalitions can be trained as rows. Return the reason why
        not, or None if they can."""
        trial = partial(not_as_rows, trainer, config, self._coalitions, self._kept.forks is not None)
        if callable(config.engine) or why_not_by_forks(trainer) is not None:
            return trial()
        ((_, found),) = supervise([("trial", trial)])
        if isinstance(found, ChildFailed) and found.killed:  # from outside: that says nothing of rows
            ((_, found),) = supervise([("trial", trial)])
        if isinstance(found, ChildFailed):
            return f"the trial of rows of one batched model has failed ({found})"
        return found

    def _give_up(self, num_clients: int, why: str) -> None:
        """Change the decision during the run: train the coalitions by fits after the run.

        Args:
            num_clients: the federation's number of clients.
            why: the reason.
        """
        self.why = why
        for metric in self._metrics.values():
            metric.await_training(after_the_run=True)
        rank_zero_warn(f"flsv: {self._how(num_clients).planned()}. Until now they were trained during the run.")

    def _prove(
        self, trainer: L.Trainer, ended: bool, index: int, seed: int, members: Tensor, rows: Tensor
    ) -> str | None:
        """Train one coalition, drawn at random, again by a fit, and compare its model with the one trained as a row.

        This is done once, after the run's last round.

        Args:
            trainer: the fit's trainer.
            ended: whether the run has ended; if not, the round is the last one if its index says so.
            index: the index of the round that has ended.
            seed: the run's seed.
            members: bool ``[m, n]``, the members of the coalitions.
            rows: ``[m, P]``, their models after the round.

        Returns:
            The reason why the rows are wrong; None if the two models are equal, or if nothing was compared.
        """
        forks, last = self._kept.forks, ended or index + 1 == trainer.max_epochs
        if forks is None or self._proved or not last or not len(rows):
            return None
        self._proved = True
        assert self._initial is not None
        place = int(torch.randint(len(rows), (), generator=generator_for(seed, "proof of rows")))
        order = FitOrder(tuple(members[place].nonzero().flatten().tolist()), seed, (index,), self._initial)
        try:
            return row_disproved(forks, order, rows[place], rounding_of(trainer))
        except NotCompared as why:
            self._unproved = True
            remedy = "flsv retrain trains the coalitions again, with a proof"
            rank_zero_warn(f"flsv: the coalitions' values are not proved: {why}. {remedy}.")
            return None

    def as_rows(
        self,
        config: FederationConfig,
        give_up: Callable[[str], None] | None = None,
        prove: Prove | None = None,
    ) -> FederationConfig:
        """Return the configuration in which clients train coalitions' models together with their own models.

        Args:
            config: the federation's configuration.
            give_up: a function that is called with the reason if rows turn out to differ from separate runs; None: an
                error is raised.
            prove: a function that compares rows with a separate run, see
                :class:`flsv.retraining.shadow.ShadowTraining`; None: they are not compared.
        """
        if not self._metrics:
            return config
        algorithm: Any = config.client_algorithm  # the class is declared higher up than the configuration
        self._rows = ShadowTraining(self._coalitions, algorithm, give_up, prove)
        if self._loaded is not None:
            self._rows.load_state_dict(self._loaded)
        return replace(config, client_algorithm=self._rows)

    def masks(self, num_clients: int) -> Tensor:
        """Return the members of the K coalitions, bool ``[K, n]``, the empty and the full coalition first."""
        which = self._coalitions
        if self.why is not None and which == "auto":
            which = design_within(self._max_fits, num_clients, self._cohort)
        return coalition_masks(which, num_clients)

    def _how(self, num_clients: int) -> HowTrained:
        """Return the object that describes in the log how coalitions are trained."""
        names, own = ", ".join(self._metrics), self._drawn is not None
        masks, no_fork = self.masks(num_clients), self._kept.no_fork
        return HowTrained(names, masks, self._cohort, self.why, own, no_fork, self._unproved)

    def told(self, num_clients: int) -> list[str]:
        """Return the closing lines of a run: which metrics still wait for coalitions, else how these were trained."""
        if not self._metrics:
            return []
        waiting = [f"{name}: {metric.pending}" for name, metric in self._metrics.items() if metric.pending is not None]
        return waiting or [self._how(num_clients).done()]

    # ---- in a round

    def ends(self, space: ParameterSpace, module: L.LightningModule, num_clients: int) -> list[Strategy]:
        """Make the strategy that provides coalitions' models to the metrics, in addition to the client algorithm.

        It provides the models of the empty and the full coalition. If the run draws clients in each round, it also
        trains and provides the others'.

        Args:
            space: the map between the module and its vectors ``[P]``.
            module: the module.
            num_clients: the federation's number of clients.

        Returns:
            A list with the strategy; an empty list if the client algorithm provides all coalitions' models, or no
            metric needs them.
        """
        if self._initial is None:
            return []
        for metric in self._metrics.values():
            metric.compare_starts(untrained_models(module, self._initial, space, self._seed))
        if self.why is None and self._drawn is None:
            return []
        start = copy_module(module)
        start.load_state_dict(self._initial)
        if self._drawn is None:
            return [Ends(space.read(start), num_clients)]
        self._rows = self._drawn(masks=self.masks(num_clients), space=space, initial=space.read(start))
        return [self._rows]

    # ---- after the last round

    @property
    def left(self) -> bool:
        """Return whether coalitions still have to be trained for the values of past rounds."""
        return any(metric.pending is not None and len(metric.valued) for metric in self._metrics.values())

    def train(self, run: EndedRun) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions by fits if the plan is to do so after the run, and return the metrics' values, see
        :meth:`flsv.retraining.after_the_run.AfterTheRun.train`; else return an empty dictionary."""
        averaged = not torch.equal(run.model, run.delivered)
        if self.why is None and (why := self._late(run.trainer, run.last, averaged)):
            self._give_up(run.data.num_clients, why)
            for metric in self._metrics.values():
                metric.value_again(run.last)
        if not self.left:
            return {}
        assert self._initial is not None
        waiting = {name: metric for name, metric in self._metrics.items() if metric.pending is not None}
        return AfterTheRun(waiting, self.masks(run.data.num_clients), self._kept, self._initial).train(run)

    def _late(self, trainer: L.Trainer, index: int, changed: bool) -> str | None:
        """Return the reason, found at the end of a run, why values from rows must be computed again by fits, or None.

        Args:
            trainer: the fit's trainer, after training.
            index: the index of the run's last round.
            changed: whether a hook has changed the model after the last round.
        """
        if self._rows is None or not self._kept:
            return None
        if changed:
            return "a hook changes the model when training ends, as an average of weights does"
        return self._rows.proved_by(partial(self._prove, trainer, True), index)
