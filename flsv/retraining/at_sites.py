"""AtSites: the training of coalitions by the sites of a run, beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.games.members import Members, members_of
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.after_the_run import NoValues
from flsv.retraining.coalition_refusals import check_shared, excluded_callbacks
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.price import Choice, PriceList, Request
from flsv.retraining.scored_run import ScoredRun
from flsv.utilities.wings import from_wing
from flsv.values.coalition_files import Outputs, ScoredModel


class AtSites:
    """The training of coalitions at sites, each as a federation of its members. The arguments are those of ``Here``."""

    scores_each_round = True

    def __init__(
        self, config: FederationConfig, metrics: Mapping[str, ShadowShapley], request: Request
    ) -> None:
        self._config = config
        self._metrics = metrics
        # The CoalitionsAtSites of flsv.sites, in a fit.
        self._coalitions: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_coalitions": None}

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check the run before its fit."""
        excluded_callbacks(trainer, self._metrics.values(), at_sites=True)
        from_wing("coalitions", "sites").check_at_sites(self._config)

    def begin(self, run: MeasuredRun, choose: Callable[[PriceList], Choice]) -> None:
        """Add the strategy by which the sites train coalitions to those of the run."""
        choice = choose(self.prices(run, {}))
        federation = run.federation
        module = run.trainer.lightning_module
        check_shared(self._config, module)
        self._coalitions = from_wing("coalitions", "sites").CoalitionsAtSites(
            choice.design,
            replace(federation.info(), global_vector=federation.space.read(module)),
            federation.engine,
            memory=run.memory,
            consistency_warnings=federation.coalition_differences,
        )
        federation.server.strategies.append(self._coalitions)

    def check(self) -> None:
        """Nothing has failed before the fit."""

    def begin_training(self, run: MeasuredRun) -> bool:
        """Return whether there will be values."""
        return True

    def prices(self, run: MeasuredRun, outputs: Outputs) -> PriceList:
        """Return the prices of coalitions that cannot be trained at once."""
        return PriceList([1] * run.data.num_clients, run.clients_per_round)

    def plan_in_words(self, run: MeasuredRun, choice: Choice, masks: Tensor) -> str:
        """Say which coalitions ``masks [K, n]`` are trained."""
        return f"{choice.design.in_words(masks)} trained by the sites, beside the run."

    def duration_in_words(self, *_: Any) -> str:
        """Say nothing: the rounds of the run have training and scoring in them."""
        return ""

    def end_round(self, run: MeasuredRun, index: int) -> None:
        """Sites have trained their models already."""

    def scored_models(self, scored: ScoredRun) -> Iterator[tuple[Members, ScoredModel]]:
        """Score the models that a round has trained."""
        run = scored.run
        models = {**self._coalitions.models(), run.all_clients: run.federation.state.model()}
        yield from zip(models, scored.scoring.score_vectors(list(models.values())))

    def train(
        self,
        scored: ScoredRun,
        metrics: Mapping[str, ShadowShapley],
        choice: Choice,
    ) -> tuple[Choice, Tensor]:
        """Exclude the rounds after which models of coalitions are missing in the store, since sites do not train them
        again. Return the choice, and all coalitions, bool ``[K, n]``.
        """
        store = scored.store
        masks: Tensor = self._coalitions.masks
        rounds = store.rounds
        store.rounds = store.rounds_of_all(scored.run.seed, members_of(masks))
        missing_rounds = sorted(set(rounds).difference(store.rounds))
        if missing_rounds:
            numbers = [index + 1 for index in missing_rounds]
            sentence = f"coalitions have no scores after the rounds {numbers}, and sites do not train rounds again"
            if rounds[-1] in missing_rounds:
                raise NoValues(f"{sentence}.")
            rank_zero_warn(f"{', '.join(self._metrics)}: {sentence}.")
        return choice, masks

    def shares_no_class(self, run: MeasuredRun) -> bool:
        """Return False: the server must not know the classes of clients."""
        return False

    def close(self) -> None:
        """Nothing was changed in the process."""
