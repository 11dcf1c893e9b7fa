"""FitsInProcesses: trains coalitions in child processes, each by a fit of its own.

Since each fit has a process of its own, no fit can change what the module, a callback or a data set of another fit
refers to. The coalition of all clients must come to the run's own weights where these are known
(:mod:`flsv.retraining.proof`).
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
from flsv.core import find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import Measure
from flsv.games.members import Members
from flsv.games.performance import ModelScore
from flsv.games.trained_game import OutputScore
from flsv.retraining.coalition_fit import FitOrder, coalition_loop, into_a_coalitions_fit, of_the_run
from flsv.retraining.global_model_scoring import GlobalModelScoring
from flsv.retraining.proof import difference
from flsv.retraining.train_fits import Fit, once_proved
from flsv.retraining.utility_store import LAST
from flsv.sampling import FullParticipation
from flsv.server.round_server import NoModel
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import ChildFailed, supervise

#: Name of the performance measure in a fit's result, if there is only one.
UTILITY = "utility"


@dataclass(frozen=True)
class Piece:
    """Task of a child process: to train one coalition by a fit.

    Args:
        seed: the seed of the training.
        members: the coalition.
        models: whether the answer contains the models before and after training.
        nudged: whether the fit starts from slightly changed weights, to measure the effect of rounding.
        save: the path of a checkpoint for the trained module; None: none is written.
    """

    seed: int
    members: Members
    models: bool = False
    nudged: bool = False
    save: Path | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Task of a child process: to compute values from the outputs of trained coalitions, for each of s seeds.

    Args:
        seed: the seed with which the federation is built; nothing is trained.
        masks: bool ``[K, n]``, the trained coalitions, the empty one first.
        utilities: float64 ``[s, K, C]``, their utilities by C performance measures.
        outputs: ``[s, K - 1, V, ...]``, the outputs of all but the empty coalition for V validation samples.
    """

    seed: int
    masks: Tensor
    utilities: Tensor
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class Predicted:
    """Values from predicted outputs, and how much the two predictions differ, both float64 ``[s, n, C]``."""

    values: Tensor
    disagreement: Tensor


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
    piece: Piece | Prediction,
    federation: Federation,
    folder: str,
    checkpoint: Path | None = None,
    participation: Participation = "drawn",
) -> Fit | Predicted | ConfigurationError:
    """Do a piece of work in this process.

    Args:
        piece: the piece of work.
        federation: the federation, whose trainer, module and data are changed by the training.
        folder: a folder into which callbacks may write.
        checkpoint: the run's last checkpoint. If a fit returns its models, the checkpoint's weights follow as a third
            row of :attr:`flsv.retraining.train_fits.Fit.model`. None: there is no checkpoint to compare with.
        participation: whether each coalition draws its own cohorts as the federation does, or all its members train.

    Returns:
        The :class:`flsv.retraining.train_fits.Fit` of the coalition, or the predicted values; or, without raising it,
        the error by which the work was refused.
    """
    callbacks: list[Any] = callbacks_of(federation.trainer)
    if participation == "all":
        callbacks[:] = [each.replace(sampler=FullParticipation()) if is_loop(each) else each for each in callbacks]
    try:
        if isinstance(piece, Prediction):
            return _predict(piece, federation)
        return _train(piece, federation, folder, checkpoint)
    except ConfigurationError as error:
        return error


def _train(piece: Piece, federation: Federation, folder: str, checkpoint: Path | None) -> Fit:
    measure, trainer = federation.measure, federation.trainer
    held: Any = trainer
    named: Any = {UTILITY: measure} if isinstance(measure, str | ModelScore) else {name: name for name in measure}
    order = FitOrder(piece.members, piece.seed, (int(trainer.max_epochs or 0) - 1,), nudged=piece.nudged)
    scoring = into_a_coalitions_fit(trainer, federation.data, named, order, folder)
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(federation.module, federation.data)
    fit = scoring.result().fit([LAST], piece.models)
    if piece.save is not None:
        del held.save_checkpoint, held.strategy.save_checkpoint  # in a coalition's fit they do nothing
        trainer.save_checkpoint(piece.save, weights_only=True)
    if fit.model is None or checkpoint is None:
        return fit
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    federation.module.load_state_dict(saved["state_dict"])
    return replace(fit, model=torch.cat([fit.model, scoring.space.read(federation.module).cpu()[None]]))


def _predict(piece: Prediction, federation: Federation) -> Predicted:
    callbacks: list[Any] = callbacks_of(federation.trainer)
    loop, measured = find_loop(callbacks), _Evaluator(federation)
    others = [each for each in callbacks if each is not loop and not of_the_run(each)]
    callbacks[:] = [measured, *others, coalition_loop(loop, loop.config.sampler, piece.seed)]
    federation.trainer.loggers = []
    federation.trainer.fit(federation.module, federation.data)
    return measured.predict(piece, loop.config.client_weights(federation.data.num_samples))


class _Evaluator(GlobalModelScoring):
    """Callback that makes the evaluator of a federation's performance measure, and ends the fit before it trains."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation.data, [federation.measure], None, rounds=())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop, trainer.fit_loop.min_epochs = True, 0

    def predict(self, piece: Prediction, weights: Tensor) -> Predicted:
        """Compute the values of all seeds; ``weights [n]`` are those of the clients in the federation's average."""
        (evaluator,), (measure,) = self._evaluators, self._measures
        by = OutputScore.of(evaluator, measure)
        assert by is not None
        found = [
            by.shapley(piece.masks, utilities, torch.cat([torch.zeros_like(outputs[:1]), outputs]), weights)
            for utilities, outputs in zip(piece.utilities, piece.outputs)
        ]
        return Predicted(*(torch.stack(part) for part in zip(*((each.values, each.disagreement) for each in found))))


class FitsInProcesses:
    """Object that trains coalitions in child processes, see :class:`flsv.retraining.train_fits.Fits`.

    Args:
        task: a function that turns a :class:`Piece` or a :class:`Prediction` into a task for a child process, whose
            answer is the result of :func:`work_on`.
        num_clients: n, the number of clients.
        jobs: the number of processes that run at once.
        limit_s: the seconds after which a process is ended; None: there is no limit.
        proved_by: the seed of the run. With this seed the coalition of all clients must come to the weights of the
            run's checkpoint, which its task returns, too. None: the run's weights are unknown.
        run: a function that runs tasks, with the arguments of :func:`flsv.utilities.supervisor.supervise`.
    """

    def __init__(
        self,
        task: Callable[[Piece | Prediction], Any],
        num_clients: int,
        jobs: int = 1,
        limit_s: float | None = None,
        proved_by: int | None = None,
        run: Callable[..., Iterator[tuple[Any, Any]]] = supervise,
    ) -> None:
        self._task, self.at_once, self._limit_s, self._proved_by = task, jobs, limit_s, proved_by
        self._everybody, self._supervise = tuple(range(num_clients)), run

    def fits(self, coalitions: Sequence[Members], seed: int) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        proof = self._everybody if coalitions and seed == self._proved_by else None
        yield from once_proved(self._fits(coalitions, seed, proof), proof)

    def predict(self, prediction: Prediction) -> Predicted:
        """Compute values from trained coalitions' outputs.

        Raises:
            ConfigurationError: the child process has failed.
        """
        ((_, answer),) = self._run({None: prediction})
        if isinstance(answer, ChildFailed):
            raise ConfigurationError(f"the outputs of coalitions could not be scored: {answer}")
        return answer  # type: ignore[no-any-return]

    def _fits(
        self, coalitions: Sequence[Members], seed: int, proof: Members | None
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        first = [] if proof is None else [proof]
        order = dict.fromkeys([*first, *sorted(coalitions, key=lambda members: members != self._everybody)])
        for members, answer in self._run({each: Piece(seed, each, models=each == proof) for each in order}):
            if members == proof and isinstance(answer, Fit):
                self._prove(answer, seed)
            yield members, answer

    def _run(self, pieces: Mapping[Any, Piece | Prediction]) -> Iterator[tuple[Any, Any]]:
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

        def again(nudged: bool) -> tuple[Tensor, Tensor] | None:
            ((_, other),) = self._run({None: Piece(seed, self._everybody, models=True, nudged=nudged)})
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
