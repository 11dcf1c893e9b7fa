"""FitsInProcesses: trains coalitions in child processes, of which each does one piece of work.

Since each fit has a process of its own, no fit can change what the module, a callback or a data set of another fit
refers to. The coalition of all clients, trained in the same way, must come to the run's own weights where these are
known (:mod:`flsv.retraining.proof`). Where coalitions are rows of one batched model, the coalition of all and another
one, drawn at random, are trained by fits as well, and must come to the same models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import Rounding
from flsv.core import find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import Measure, utility_of
from flsv.games.members import Members, members_of
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import FitOrder, coalition_loop, into_a_coalitions_fit
from flsv.retraining.proof import difference
from flsv.retraining.retrained_utility import TrainedGame
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility, check_same
from flsv.retraining.train_fits import Fit, FitsFailed, once_proved
from flsv.retraining.utility_store import LAST
from flsv.sampling import ClientSampler, FullParticipation
from flsv.server.round_server import NoModel
from flsv.training.rows.row_checks import of_the_run
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import derive_seed
from flsv.utilities.supervisor import ChildFailed, supervise


@dataclass(frozen=True)
class Piece:
    """Task of a child process: either to train one coalition by a fit, or many as rows of one batched model.

    Args:
        seed: the seed of the trainings.
        coalitions: the coalitions to train, exactly one without ``rows``.
        rows: whether to train the coalitions as rows of one batched model rather than one by a fit.
        models: those of ``coalitions`` whose models the answer contains, beside the utilities of all.
        nudged: whether a fit starts from slightly changed weights, to measure the effect of rounding.
    """

    seed: int
    coalitions: Sequence[Members]
    rows: bool = False
    models: Sequence[Members] = ()
    nudged: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """Coalitions that were trained as rows of one batched model.

    Args:
        utilities: ``[K]`` or ``[K, C]``, the coalitions' utilities.
        checked: ``[3, P]``, see :attr:`flsv.retraining.side_by_side.CoalitionTraining.checked`.
        models: ``{members: model [P]}`` of the coalitions in :attr:`Piece.models`.
        rounding: the tolerances for comparing these models with those of fits.
    """

    utilities: Tensor
    checked: Tensor
    models: Mapping[Members, Tensor]
    rounding: Rounding


@dataclass(frozen=True, eq=False)
class Federation:
    """Federation before its fit, for :func:`work_on`.

    Args:
        trainer: the trainer, with a :class:`flsv.FederatedLoop` among its callbacks.
        module: the module.
        data: the data module.
        measure: the performance measure by which trained models are scored.
    """

    trainer: L.Trainer
    module: L.LightningModule
    data: FederatedDataModule
    measure: Measure


def work_on(
    piece: Piece,
    federation: Federation,
    folder: str,
    checkpoint: Path | None = None,
    participation: Participation = "drawn",
) -> Fit | Rows | ConfigurationError:
    """Train the coalitions of a piece of work in this process.

    Args:
        piece: the piece of work.
        federation: the federation, whose trainer, module and data are changed by the training.
        folder: a folder into which callbacks may write.
        checkpoint: the run's last checkpoint. If a fit returns its models, the checkpoint's weights follow as a third
            row of :attr:`flsv.retraining.train_fits.Fit.model`. None: there is no checkpoint to compare with.
        participation: whether each coalition draws its own cohorts as the federation does, or all its members train.

    Returns:
        :class:`Rows` if ``piece.rows``, else the :class:`flsv.retraining.train_fits.Fit` of the coalition; or, without
        raising it, the error by which training was refused.
    """
    callbacks: list[Any] = callbacks_of(federation.trainer)
    if participation == "all":
        callbacks[:] = [each.replace(sampler=FullParticipation()) if is_loop(each) else each for each in callbacks]
    try:
        if piece.rows:
            return _train_rows(piece, federation)
        return _train_fit(piece, federation, folder, checkpoint)
    except ConfigurationError as error:
        return error


def _train_rows(piece: Piece, federation: Federation) -> Rows:
    callbacks: list[Any] = callbacks_of(federation.trainer)
    loop = find_loop(callbacks)

    def make(cohort: ClientSampler) -> tuple[L.Trainer, L.LightningModule]:
        others = [each for each in callbacks if each is not loop and not of_the_run(each)]
        callbacks[:] = [*others, coalition_loop(loop, cohort, piece.seed)]
        federation.trainer.loggers = []
        return federation.trainer, federation.module

    game = TrainedGame(make, federation.data, federation.measure, sampler=loop.config.sampler)
    masks = torch.zeros(len(piece.coalitions), game.num_players, dtype=torch.bool)
    for mask, members in zip(masks, piece.coalitions):
        mask[list(members)] = True
    trained = SideBySideUtility(game, piece.seed, compare=False).train(masks)
    models = {members: trained.models[piece.coalitions.index(members)].cpu() for members in piece.models}
    return Rows(utility_of(trained.scores, game.metric).cpu(), trained.checked.cpu(), models, trained.rounding)


def _train_fit(piece: Piece, federation: Federation, folder: str, checkpoint: Path | None) -> Fit:
    (members,), measure, trainer = piece.coalitions, federation.measure, federation.trainer
    named: Any = {"utility": measure} if isinstance(measure, str | ModelScore) else {name: name for name in measure}
    order = FitOrder(members, piece.seed, (int(trainer.max_epochs or 0) - 1,), nudged=piece.nudged)
    scoring = into_a_coalitions_fit(trainer, federation.data, named, order, folder)
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(federation.module, federation.data)
    fit = scoring.result().fit([LAST], members in piece.models)
    if fit.model is None or checkpoint is None:
        return fit
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    federation.module.load_state_dict(saved["state_dict"])
    return replace(fit, model=torch.cat([fit.model, scoring.space.read(federation.module).cpu()[None]]))


class FitsInProcesses:
    """Object that trains coalitions in child processes, see :class:`flsv.retraining.train_coalitions.Trainings`.

    Args:
        task: a function that turns a :class:`Piece` into a task for a child process, whose answer is the result of
            :func:`work_on`.
        num_clients: n, the number of clients.
        jobs: the number of processes that run at once.
        limit_s: the seconds after which a process is ended; None: there is no limit.
        proved_by: the seed of the run. With this seed the coalition of all clients must come to the weights of the
            run's checkpoint, which its task returns, too. None: the run's weights are unknown.
        run: a function that runs tasks, with the arguments of :func:`flsv.utilities.supervisor.supervise`.
    """

    def __init__(
        self,
        task: Callable[[Piece], Any],
        num_clients: int,
        jobs: int = 1,
        limit_s: float | None = None,
        proved_by: int | None = None,
        run: Callable[..., Iterator[tuple[Any, Any]]] = supervise,
    ) -> None:
        self._task, self.at_once, self._limit_s, self._proved_by = task, jobs, limit_s, proved_by
        self._everybody, self._supervise = tuple(range(num_clients)), run

    def rows(self, masks: Tensor, seed: int, compare: bool) -> Tensor:
        coalitions = members_of(masks)
        proper = [members for members in coalitions if 0 < len(members) < len(self._everybody)]
        drawn = [proper[derive_seed(seed, "proof") % len(proper)]] if compare and proper else []
        by_fits = [self._everybody, *drawn] if compare else []
        pieces: dict[Any, Piece] = {None: Piece(seed, coalitions, rows=True, models=drawn)}
        pieces |= {members: Piece(seed, [members], models=[members]) for members in by_fits}
        found: dict[Any, Any] = {}
        for members, answer in self._run(pieces):
            if isinstance(answer, ChildFailed):
                raise NotSideBySide(f"{answer}") if members is None else FitsFailed({members: answer})
            found[members] = answer
            if members == self._everybody and seed == self._proved_by:
                self._prove(answer, seed)
        rows: Rows = found[None]
        for members in by_fits:
            model, start = found[members].model[:2]
            mine = rows.checked if members == self._everybody else rows.models[members] + rows.checked - rows.checked[0]
            check_same(torch.stack([mine[0], start, mine[2]]), model, rows.rounding)
        return rows.utilities

    def fits(self, coalitions: Sequence[Members], seed: int) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        proof = self._everybody if coalitions and seed == self._proved_by else None
        yield from once_proved(self._fits(coalitions, seed, proof), proof)

    def _fits(
        self, coalitions: Sequence[Members], seed: int, proof: Members | None
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        first = [] if proof is None else [proof]
        order = dict.fromkeys([*first, *sorted(coalitions, key=lambda members: members != self._everybody)])
        for members, answer in self._run({each: Piece(seed, [each], models=first) for each in order}):
            if members == proof and isinstance(answer, Fit):
                self._prove(answer, seed)
            yield members, answer

    def _run(self, pieces: Mapping[Any, Piece]) -> Iterator[tuple[Any, Any]]:
        """Run ``{name: piece}`` in child processes, and yield each piece's name and answer; raise an answer that is a
        ConfigurationError."""
        tasks = ((name, self._task(piece)) for name, piece in pieces.items())
        for name, answer in self._supervise(tasks, self.at_once, self._limit_s):
            if isinstance(answer, ConfigurationError):
                raise answer
            yield name, answer

    def _prove(self, fit: Fit, seed: int) -> None:
        """Raise ConfigurationError if ``fit``, that of all clients, came to a model other than the run's."""
        assert fit.model is not None
        mine, start, run = fit.model
        piece = Piece(seed, [self._everybody], models=[self._everybody])

        def again(nudged: bool) -> tuple[Tensor, Tensor] | None:
            ((_, other),) = self._run({None: replace(piece, nudged=nudged)})
            return (other.model[1], other.model[0]) if isinstance(other, Fit) and other.model is not None else None

        share = difference(mine, run, start, again, fit.rounding)
        if share is not None:
            raise ConfigurationError(
                "there are no values: the coalition of all clients, trained again from the run's configuration, came "
                f"to another model than the run's last checkpoint ({100 * share:.2g} % of the way that training went "
                "lie between them). Code, data or packages have changed since, or its training does not follow from "
                "configuration and seed. Train the run again (flsv fit --config RUN/config.yaml), and retrain that."
            )
        self._proved_by = None
