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
from flsv.metrics.shadow import Coalitions, ShadowShapley, coalition_masks, design_within, fits_of
from flsv.privacy import GaussianPrivacy
from flsv.retraining.coalition_rounds import samplers_among
from flsv.retraining.drawn_coalitions import DrawnCoalitions
from flsv.retraining.shadow import ShadowTraining, ends_of, not_as_rows
from flsv.retraining.whole_fits import COALITIONS, CoalitionFailed, Spare, WholeFits, called
from flsv.sampling import FullParticipation
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError

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
                f"metrics {list(metrics)} are of different coalitions, and one set is trained in a run. Give them the "
                "same, or leave all but one out."
            )
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
        self._spare: Spare | None = None
        self._no_copy = ""
        self._initial: dict[str, Any] | None = None
        self._rows: ShadowTraining | DrawnCoalitions | None = None
        self._seed, self._cohort = 0, None  # type: int, float | None
        self._drawn: Callable[..., DrawnCoalitions] | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spare": None, "_drawn": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: the decision, the initial weights and the coalitions' models."""
        rows = self._loaded if self._rows is None else self._rows.state_dict()
        return {"why": self.why, "initial": self._initial, "rows": rows if self.why is None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.why, self._initial, self._loaded, self._decided = state["why"], state["initial"], state["rows"], True

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Store a copy of the trainer and the module, before the fit changes them, for fits of coalitions after it."""
        if self._spare is not None or not self._metrics:
            return
        try:
            self._spare = Spare(trainer, module)
        except Exception as error:  # a callback or the module cannot be copied: reported if the copy is needed
            self._no_copy = f"{type(error).__name__}: {error}"

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
            why_not = not_as_rows(trainer, config, self._coalitions)
            self.why = ranks_of(trainer).broadcast(0, why_not, "how coalitions are trained")
            self._decided = True
            self._initial = copy.deepcopy(trainer.lightning_module.state_dict())
        for metric in self._metrics.values():
            metric.await_training(after_the_run=self.why is not None)
        if self.why is None:
            alone = not elsewhere and ranks_of(trainer).size == 1
            if not alone or self._spare is None:
                self._spare = None
            give_up = None if self._spare is None else partial(self._give_up, data.num_clients)
            full = isinstance(config.sampler, FullParticipation)
            if not full:
                self._drawn = partial(DrawnCoalitions, trainer, limit=limit, saved=self._loaded, give_up=give_up)
            rank_zero_info(f"flsv: {self._in_words(data.num_clients)}.")
            return self.as_rows(config, give_up) if full else config
        if elsewhere:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}; and the clients' data are elsewhere, where no coalition can be trained "
                "after the run. Leave ShadowShapley out, and use flsv retrain where all data are."
            )
        if self._spare is None:
            raise ConfigurationError(
                f"ShadowShapley: {self.why}. To train coalitions after the run, the Trainer, its callbacks and the "
                f"module are copied before it, and one of them cannot be ({self._no_copy}). Leave that out, or leave "
                "ShadowShapley out."
            )
        rank_zero_info(f"flsv: {self._in_words(data.num_clients)}.")
        return config

    def _give_up(self, num_clients: int, why: str) -> None:
        """Change the decision during the run: train the coalitions by fits after the run.

        Args:
            num_clients: the federation's number of clients.
            why: the reason.
        """
        self.why = why
        for metric in self._metrics.values():
            metric.await_training(after_the_run=True)
        rank_zero_warn(f"flsv: {self._in_words(num_clients)}. Until here they were rows of one batched model.")

    def as_rows(self, config: FederationConfig, give_up: Callable[[str], None] | None = None) -> FederationConfig:
        """Return the configuration in which clients train coalitions' models together with their own models.

        Args:
            config: the federation's configuration.
            give_up: a function that is called with the reason if rows turn out to differ from separate runs; None: an
                error is raised.
        """
        if not self._metrics:
            return config
        algorithm: Any = config.client_algorithm  # the class is declared higher up than the configuration
        self._rows = ShadowTraining(self._coalitions, algorithm, give_up)
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
            return (
                f"{names}: clients train the models of {len(masks) - 2} coalitions{own} beside their own, as rows of "
                "one batched model"
            )
        reason, _, need = self.why.rpartition(". ")
        need = f"; as rows of one batched model it would need: {need[0].lower()}{need[1:]}" if reason else ""
        fits = f"{fits_of(masks, self._cohort):.3g} more fits"
        return (
            f"{names}: {len(masks) - 2} coalitions are trained after the run, each by a fit of its own, which costs "
            f"{fits}; values stand after training. The reason: {reason or self.why}{need}"
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
            how = (
                f"clients trained the models of {count} coalitions{own} beside their own, as rows of one batched model"
            )
        else:
            fits = f"{fits_of(masks, self._cohort):.3g} fits in all"
            how = f"{count} coalitions were trained after the run, each by a fit of its own, {fits}"
        return waiting or [f"{names[0].upper()}{names[1:]}: {how}"]

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
    ) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions after the run, if this was decided, and compute the metrics' values.

        Args:
            trainer: the fit's trainer, after the last round.
            data: the data module, with its samples assigned to clients.
            seed: the run's seed.
            folder: the run's folder, into which the coalitions' utilities are written; None: they are not written.
            settings: the settings that these utilities depend on.
            resumed: whether utilities that are in the folder already belong to this run.

        Returns:
            ``{round: {metric: values}}``, the metrics' values after each round; empty if a training has failed, which a
            warning reports.
        """
        waiting = {name: metric for name, metric in self._metrics.items() if metric.pending is not None}
        rounds = sorted({index for metric in waiting.values() for index in metric.valued.tolist()})
        if not rounds:
            return {}
        assert self._spare is not None
        assert self._initial is not None
        masks = self.masks(data.num_clients)
        path = None if folder is None else folder / COALITIONS
        of_run = self._spare, data, seed, self._initial
        fits = WholeFits(*of_run, _measures(waiting.values()), rounds, ranks_of(trainer), path, settings, resumed)
        try:
            curves = fits(masks[2:])
        except CoalitionFailed as error:  # the federation itself is trained
            rank_zero_warn(f"{', '.join(waiting)}: there are no values. {error}")
            return {}
        found: dict[int, dict[str, Tensor]] = {index: {} for index in rounds}
        for name, metric in waiting.items():
            valued = metric.valued.tolist()
            by = called(metric.measured_by)
            utilities = torch.stack([curve[by] for curve in curves], 1)[[rounds.index(index) for index in valued]]
            for index, values in metric.complete(masks, utilities).items():
                found[index][name] = values
        return found


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
