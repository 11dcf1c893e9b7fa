"""CoalitionPlan: decides how to train the models of the coalitions that metrics need.

If training as rows of one batched model gives the same models as a separate run of each coalition, the coalitions are
trained during the federation's fit (:mod:`flsv.retraining.shadow`); otherwise after it, each by a fit of its own
(:mod:`flsv.retraining.whole_fits`). The decision is made, and shown, before the first round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.rounding import rounding_of
from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core import Round, TrainedCoalitions
from flsv.core.parameter_space import ParameterSpace
from flsv.core.sharing import sharing
from flsv.core.strategy import Strategy
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.games.copy_module import copy_module
from flsv.games.performance import CLASSIFICATION, ModelScore
from flsv.games.untrained import untrained_models
from flsv.metrics.coalitions.designs import Coalitions, coalition_masks, design_within, fits_of
from flsv.metrics.shadow import ShadowShapley
from flsv.privacy import GaussianPrivacy
from flsv.retraining.coalition_fit import CoalitionFailed, CoalitionFits, FitOrder
from flsv.retraining.coalition_rounds import samplers_among
from flsv.retraining.copied_fits import CopiedFits, Spare
from flsv.retraining.drawn_coalitions import DrawnCoalitions
from flsv.retraining.forked_fits import ForkedFits, why_not_by_forks
from flsv.retraining.proof import difference
from flsv.retraining.shadow import Prove, ShadowTraining, ends_of, not_as_rows
from flsv.retraining.whole_fits import COALITIONS, Unproved, WholeFits, called, trained_again
from flsv.sampling import FullParticipation
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from flsv.utilities.supervisor import ChildFailed, supervise

#: Advice in error messages, for runs whose base configuration on the command line has the metric.
WITHOUT = "leave ShadowShapley out (--config digits is quickstart without it)"


class CoalitionPlan:
    """The training of the coalitions that a loop's metrics need: during the run as rows of one batched model, or after
    the run by separate fits.

    Args:
        metrics: the metrics that need trained coalitions, by name, see :attr:`flsv.metrics.ShadowShapley.trains`.

    Attributes:
        why: the reason why coalitions are trained after the run; None: they are trained during the run, or this is not
            decided yet.

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
        self._forks: ForkedFits | None = None
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
        if asking and (why := _refused(config)):
            raise ConfigurationError(
                f"ShadowShapley trains a model for each of many coalitions, and {why}, or {WITHOUT}."
            )
        return cls(asking)

    def reset(self) -> None:
        """Forget the decision and the coalitions' models of an earlier fit."""
        self.why: str | None = None
        self._decided = False
        self.close()
        self._spare: Spare | None = None
        self._no_fork: str | None = None
        self._no_copy = ""
        self._initial: dict[str, Any] | None = None
        self._rows: ShadowTraining | DrawnCoalitions | None = None
        self._seed, self._proved = 0, False
        self._cohort: float | None = None
        self._drawn: Callable[..., DrawnCoalitions] | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spare": None, "_forks": None, "_drawn": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: the decision, the initial weights and the coalitions' models."""
        rows = self._loaded if self._rows is None else self._rows.state_dict()
        return {"why": self.why, "initial": self._initial, "rows": rows if self.why is None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.why, self._initial, self._loaded, self._decided = state["why"], state["initial"], state["rows"], True

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Keep the fit's beginning, before the fit changes anything, for fits of coalitions after it: by a fork of this
        process or, where that cannot be, by copies of the Trainer and the module.

        Returns:
            Whether this process is a coalition's fork, in which the Trainer has been changed into the coalition's.
        """
        if self._forks is not None or self._spare is not None or not self._metrics:
            return False
        self._no_fork = why_not_by_forks(trainer)
        if self._no_fork is None:
            self._forks = ForkedFits(trainer, module, _measures(self._metrics.values()))
            return self._forks.begun
        if trainer.current_epoch:
            self._no_copy = "this Trainer has been fitted before: make a new one, and resume from a checkpoint"
            return False
        try:
            self._spare = Spare(trainer, module)
        except Exception as error:  # a callback or the module cannot be copied: reported if the copy is needed
            self._no_copy = f"{type(error).__name__}: {error}"
        return False

    def close(self) -> None:
        """End the process that waits at the fit's beginning."""
        forks = vars(self).get("_forks")
        if forks is not None:
            forks.close()
        self._forks = None

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
            The configuration to train with: if coalitions are trained during the run, with another client algorithm.

        Raises:
            ConfigurationError: the federation allows neither way of training coalitions.
        """
        if not self._metrics:
            return config
        if kept := sharing(config.share, trainer.lightning_module, config.head).kept:
            raise ConfigurationError(
                f"ShadowShapley trains a model for each of many coalitions, and with share={config.share!r} "
                f"{sorted(kept)[0]!r} and others stay at the clients. Share all that is trained, or {WITHOUT}."
            )
        elsewhere, self._seed = callable(config.engine), config.seed or 0
        try:
            samplers_among(config.sampler, self.masks(data.num_clients))
            self._cohort = float(config.sampler.inclusion_probabilities(data.num_clients, {}).sum())
        except ConfigurationError as error:
            raise ConfigurationError(
                f"ShadowShapley trains each of many coalitions alone, and {error} Or {WITHOUT}."
            ) from None
        if not self._decided:
            why_not = self._why_not_rows(trainer, config)
            self.why = ranks_of(trainer).broadcast(0, why_not, "how coalitions are trained")
            self._decided = True
            self._initial = copy.deepcopy(trainer.lightning_module.state_dict())
        for metric in self._metrics.values():
            metric.await_training(after_the_run=self.why is not None)
        if self.why is None:
            give_up = None
            if not elsewhere and ranks_of(trainer).size == 1 and (self._spare or self._forks):
                give_up = partial(self._give_up, data.num_clients)
            else:
                self.close()
                self._spare = None
            full = isinstance(config.sampler, FullParticipation)
            prove = None if give_up is None else partial(self._prove, trainer, False)
            if not full:
                self._drawn = partial(
                    DrawnCoalitions, trainer, limit=limit, saved=self._loaded, give_up=give_up, prove=prove
                )
            rank_zero_info(f"flsv: {self._in_words(data.num_clients)}.")
            return self.as_rows(config, give_up, prove) if full else config
        if elsewhere:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}; and the clients' data are not on this machine, so that "
                "no coalition can be "
                "trained after the run. Leave ShadowShapley out, and use flsv retrain where all data are."
            )
        if self._spare is None and self._forks is None:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}. To train coalitions after the run, the Trainer, its callbacks and the "
                f"module are copied before it, since {self._no_fork}; and one of them cannot be copied "
                f"({self._no_copy}). Leave that out, or leave ShadowShapley out."
            )
        rank_zero_info(f"flsv: {self._in_words(data.num_clients)}.")
        return config

    def _why_not_rows(self, trainer: L.Trainer, config: FederationConfig) -> str | None:
        """Try in a fork, where there can be one, whether coalitions can be trained as rows; return why they cannot."""
        trial = partial(not_as_rows, trainer, config, self._coalitions)
        if callable(config.engine) or why_not_by_forks(trainer) is not None:
            return trial()
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
        rank_zero_warn(f"flsv: {self._in_words(num_clients)}. Until now they were trained during the run.")

    def _prove(
        self, trainer: L.Trainer, ended: bool, index: int, seed: int, members: Tensor, rows: Tensor
    ) -> str | None:
        """Train one of the coalitions that are rows, drawn at random, by a fit too, and compare the two models.

        Args:
            trainer: the fit's trainer.
            ended: whether the run has ended; if not, nothing is done before the round that is known to be the last.
            index: the index of the round that has ended.
            seed: the run's seed.
            members: bool ``[m, n]``, the members of the coalitions.
            rows: ``[m, P]``, their models after the round.

        Returns:
            Why the rows are wrong; None: they are not, or the run goes on.
        """
        forks, last = self._forks, ended or index + 1 == trainer.max_epochs
        if forks is None or self._proved or not last or not len(rows):
            return None
        self._proved = True
        assert self._initial is not None
        place = int(torch.randint(len(rows), (), generator=generator_for(seed, "proof of rows")))
        order = FitOrder(tuple(members[place].nonzero().flatten().tolist()), seed, (index,), self._initial)
        names = f"the federation of clients {list(order.members)} alone"
        ((_, found),) = forks.train([order])
        if isinstance(found, CoalitionFailed):
            return f"{names} has failed ({found})"

        again = partial(trained_again, forks, order)
        share = difference(found.last, rows[place].cpu(), found.start, again, rounding_of(trainer).steps)
        if share is None:
            return None
        return f"{names} comes to a model that lies {100 * share:.2g} % of its way from that of the row"

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
            prove: a function that is called after each round and returns the reason why rows are wrong; None: nobody
                asks.
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

    def _in_words(self, num_clients: int) -> str:
        """Describe the decision, its reason and its cost, for the log."""
        names, masks = ", ".join(self._metrics), self.masks(num_clients)
        if self.why is None:
            own = ", each with cohorts of its own," if self._drawn is not None else ""
            return f"{names}: {len(masks) - 2} coalitions{own} are trained during the run, batched"
        copies = "" if self._no_fork is None else f" by a copy of the Trainer and the module, since {self._no_fork}"
        reason, _, need = self.why.rpartition(". ")
        need = f". To train them during the run instead: {need[0].lower()}{need[1:]}" if reason else ""
        fits = f"{fits_of(masks, self._cohort):.3g} more fits"
        return (
            f"{names}: {len(masks) - 2} coalitions are trained after the run, each in a fit of its own{copies}, which "
            f"costs {fits}; the values are known after these. Reason: {reason or self.why}{need}"
        )

    def told(self, num_clients: int) -> list[str]:
        """Return the lines at the end of a run about the coalitions that were trained, or are still to be trained."""
        if not self._metrics:
            return []
        waiting = [f"{name}: {metric.pending}" for name, metric in self._metrics.items() if metric.pending is not None]
        names, masks = ", ".join(self._metrics), self.masks(num_clients)
        count = len(masks) - 2
        if self.why is None:
            own = ", each with cohorts of its own," if self._drawn is not None else ""
            how = f"{count} coalitions{own} were trained during the run, batched."
        else:
            fits = f"{fits_of(masks, self._cohort):.3g} fits in all"
            how = f"{count} coalitions were trained after the run, each in a fit of its own ({fits})."
        return waiting or [f"{names}: {how}"]

    # ---- in a round

    def ends(self, space: ParameterSpace, module: L.LightningModule, num_clients: int) -> list[Strategy]:
        """Make the strategy that provides coalitions' models during the run, beside a client algorithm.

        It provides the models of the empty and the full coalition, and with a sampler it trains the others.

        Args:
            space: the map between the module and its vectors ``[P]``.
            module: the module.
            num_clients: the federation's number of clients.

        Returns:
            The strategy in a list; an empty list if a client algorithm trains all coalitions.
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
            return [_Ends(space.read(start), num_clients)]
        self._rows = self._drawn(masks=self.masks(num_clients), space=space, initial=space.read(start))
        return [self._rows]

    # ---- after the last round

    @property
    def left(self) -> bool:
        """Return whether coalitions still have to be trained for the values of past rounds."""
        return any(metric.pending is not None and len(metric.valued) for metric in self._metrics.values())

    def train(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        seed: int,
        folder: Path | None,
        settings: Mapping[str, str],
        resumed: bool,
        run: tuple[Tensor, int, Tensor],
    ) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions after the run, if this was decided, and compute the metrics' values.

        Args:
            trainer: the fit's trainer, after the last round.
            data: the data module, with its samples assigned to clients.
            seed: the run's seed.
            folder: the run's folder, into which the coalitions' utilities are written; None: they are not written.
            settings: the settings that these utilities depend on.
            resumed: whether utilities that are in the folder already belong to this run.
            run: ``[P]``, the run's model after its last round, the index of that round, and ``[P]``, the model that the
                run delivers.

        Returns:
            ``{round: {metric: values}}``, the metrics' values after each round; empty if a training has failed, which a
            warning reports.
        """
        model, last, delivered = run
        if self.why is None and (why := self._late(trainer, last, not torch.equal(model, delivered))):
            self._give_up(data.num_clients, why)
            for metric in self._metrics.values():
                metric.value_again(last)
        waiting = {name: metric for name, metric in self._metrics.items() if metric.pending is not None}
        rounds = sorted({index for metric in waiting.values() for index in metric.valued.tolist()})
        if not rounds:
            return {}
        assert self._initial is not None
        masks = self.masks(data.num_clients)
        path = None if folder is None else folder / COALITIONS
        measures = _measures(waiting.values())
        way: CoalitionFits
        if self._forks is not None:
            way = self._forks
        else:
            assert self._spare is not None
            way = CopiedFits(self._spare, trainer.lightning_module, data, measures)
        of_run = data.num_samples, seed, self._initial
        proof = ranks_of(trainer), (model, last), rounding_of(trainer).steps
        fits = WholeFits(way, *of_run, measures, rounds, *proof, path, settings, resumed)
        try:
            curves = fits(masks[2:])
        except CoalitionFailed as error:  # the federation itself is trained
            rank_zero_warn(f"{', '.join(waiting)}: there are no values. {error}{self._remedy(error)}")
            return {}
        assert fits.everybody is not None
        everybody = fits.everybody
        found: dict[int, dict[str, Tensor]] = {index: {} for index in rounds}
        for name, metric in waiting.items():
            valued = metric.valued.tolist()
            by = called(metric.measured_by)
            averaged = valued[-1] == last and not torch.equal(everybody.last, everybody.delivered)
            if averaged or metric.ends.isnan().all():
                metric.deliver(everybody.before[by], everybody.curves[by][-1])
            utilities = torch.stack([curve[by] for curve in curves], 1)[[rounds.index(index) for index in valued]]
            for index, values in metric.complete(masks, utilities).items():
                found[index][name] = values
        return found

    def _late(self, trainer: L.Trainer, index: int, changed: bool) -> str | None:
        """Explain why the values of rows do not stand at the end of a run; None: they do.

        Args:
            trainer: the fit's trainer, after training.
            index: the index of the run's last round.
            changed: whether the fit delivers another model than that of its last round.
        """
        if self._rows is None or (self._forks is None and self._spare is None):
            return None
        if changed:
            return "a hook changes the model when training ends, as an average of weights does"
        return self._rows.proved_by(partial(self._prove, trainer, True), index)

    def _remedy(self, error: CoalitionFailed) -> str:
        """Return what to do where coalitions would not be trained as the run was, for a message."""
        if not isinstance(error, Unproved):
            return ""
        if self._forks is not None:
            return (
                ": training depends on something that neither its seed nor the state of this process at the beginning "
                "sets, as the time, a file that it writes or a generator of its own does. Seed it, and train again."
            )
        return (
            f": coalitions were trained by copies of the Trainer and the module, since {self._no_fork}, and a copy "
            "is bound to something of the original. Value the run by flsv retrain, or give flsv.retrain a function "
            "that makes the module."
        )


def _measures(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return the performances by which models are measured for some metrics, by the performances' names.

    For a classifier these are all performances of its outputs, since ``flsv retrain`` shows shares by each of them."""
    measures = {called(metric.measured_by): metric.measured_by for metric in metrics}
    classes = {} if measures.keys().isdisjoint(CLASSIFICATION) else {name: name for name in CLASSIFICATION}
    return measures | classes


class _Ends(Strategy):
    """Strategy that provides the models of the empty and the full coalition in every round.

    Args:
        nobody: ``[P]``, the model of the empty coalition.
        num_clients: the federation's number of clients.
    """

    def __init__(self, nobody: Tensor, num_clients: int) -> None:
        self._nobody, self._num_clients = nobody, num_clients

    def coalition_models(self, round: Round) -> TrainedCoalitions | None:
        assert round.server_vector is not None
        return ends_of(self._nobody, round.server_vector, self._num_clients)


def _refused(config: FederationConfig) -> str | None:
    """Explain why coalitions of a federation cannot be trained in either way, and what to do; None: they can."""
    if config.personalizer is not None:
        return f"personalizer={config.personalizer!r} gives each client a start point of its own. Leave it out"
    if any(isinstance(each, GaussianPrivacy) for each in config.uploads):
        return "noise would be spent on each of these models. Leave it out"
    if colluders := [each for each in config.uploads if isinstance(each, Collusion)]:
        return f"{colluders} compare the updates of one cohort. Leave them out"
    return None
