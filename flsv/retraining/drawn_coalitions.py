"""DrawnCoalitions: trains the models of coalitions beside a run whose sampler draws some clients in each round.

"Without client i" means the same protocol among the other clients: each coalition draws its own cohorts among its
members, as many clients as the run draws. A coalition thus trains clients that the run has not drawn, so its models
cannot be trained together with the clients' own, as in :mod:`flsv.retraining.shadow`. They are trained at the end of
each round, in the process that has the clients' data, and the run itself trains as without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import rounding_of
from flsv.core import FederationState, Round, TrainedCoalitions, find_loop
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.engines.ranks import ranks_of
from flsv.retraining.coalition_rounds import CoalitionRounds
from flsv.retraining.coalition_rows import not_the_same
from flsv.retraining.shadow import Prove, ends_of, models_of, trained_masks
from flsv.retraining.side_by_side import check_same
from flsv.training.group_options import SCHEDULED
from flsv.training.rows.row_step import NotBatched, purely
from flsv.training.rows.step_watch import GENERATORS
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs


class DrawnCoalitions(Strategy):
    """Strategy that trains the models of coalitions at the end of each round, each with cohorts of its own.

    The coalition of all clients is trained as well, as a check: it draws the run's own cohorts, so that after every
    round its model must be the global model up to rounding. It is trained a second time from slightly changed initial
    weights, to measure how much training amplifies rounding.

    Args:
        trainer: the fit's trainer, with its optimizers set up.
        masks: bool ``[K, n]``, the members of each coalition, the empty and the full coalition among them.
        space: the map between the module and its vectors ``[P]``.
        initial: ``[P]``, the model before the first round.
        limit: Lightning's ``limit_train_batches``, per client and local epoch.
        saved: the ``state_dict`` of a checkpoint; None: a new run begins.
        give_up: a function that is called with the reason if rows turn out to differ from separate runs; from then on
            no coalitions are trained. None: an error is raised instead.
        prove: as for :class:`flsv.retraining.shadow.ShadowTraining`.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        masks: Tensor,
        space: ParameterSpace,
        initial: Tensor,
        limit: float,
        saved: Mapping[str, Any] | None = None,
        give_up: Callable[[str], None] | None = None,
        prove: Prove | None = None,
    ) -> None:
        self._trainer: Any = trainer
        self._masks, self._initial, self._give_up, self._given_up = masks, initial, give_up, False
        self._prove = prove
        everybody = masks.new_ones(2, masks.shape[1])
        self._models = initial.expand(2 + len(trained_masks(masks)), -1).clone()
        self._rounding = rounding_of(trainer)
        self._models[1] = self._rounding.nudged(initial)
        if saved is not None:
            self._models = saved["rows"].to(initial)
        loop: Any = find_loop(callbacks_of(trainer))
        self._seed: int = loop.state.seed
        members, ranks = torch.cat([everybody, trained_masks(masks)]), ranks_of(trainer)
        self._rounds = CoalitionRounds(
            trainer, loop, space, members, self._models, self._seed, limit, saved, ranks=ranks
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._models, **self._rounds.state_dict()}

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        # Schedulers of rounds step before a round ends.
        self._options = self._scheduled()
        return {}

    def _scheduled(self) -> list[dict[str, Any]]:
        """Return the optimizer's present options that schedulers change, such as the learning rate, one dictionary per
        parameter group."""
        groups = self._trainer.optimizers[0].param_groups
        return [{name: value for name, value in group.items() if name in SCHEDULED} for group in groups]

    @contextmanager
    def _as_in_the_round(self) -> Iterator[None]:
        """Give the optimizer's groups, within this context, the options that they had when the round began."""
        groups, now = self._trainer.optimizers[0].param_groups, self._scheduled()
        for group, options in zip(groups, self._options):
            group.update(options)
        try:
            yield
        finally:
            for group, options in zip(groups, now):
                group.update(options)

    def end_round(self, round: Round) -> None:
        if self._given_up:
            return
        clients = round.all_clients
        assert clients is not None
        assert round.server_vector is not None
        try:
            with (
                warnings.catch_warnings(),
                isolated_rngs(self._seed, "coalitions"),
                self._as_in_the_round(),
                purely(self._trainer.lightning_module, GENERATORS),
            ):
                warnings.simplefilter("ignore")  # only the run's own server warns, not the coalitions' servers
                self._models = self._rounds.train(
                    round.round_index, self._models, clients, round.server_data, lenient=True
                )
            check_same(
                torch.stack([self._models[0], self._initial, self._models[1]]), round.server_vector, self._rounding
            )
            if self._prove is not None and (why := self.proved_by(self._prove, round.round_index)):
                raise not_the_same(why)
        except ConfigurationError as error:
            reason = error.reason if isinstance(error, NotBatched) else str(error)
            if self._give_up is None:
                raise not_the_same(reason) from error
            self._given_up = True
            self._give_up(reason)

    def proved_by(self, prove: Prove, index: int) -> str | None:
        """Call ``prove`` with the coalitions and their models after the round ``index``, and return its answer."""
        return prove(index, self._seed, trained_masks(self._masks), self._models[2:])

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        if self._given_up:
            return ends_of(self._initial, round.server_vector, self._masks.shape[1])
        return models_of(self._masks, self._initial, round.server_vector, self._models[2:])
