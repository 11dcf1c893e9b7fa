"""FitsInProcesses: trains coalitions in child processes, one fit in each.

No fit can then change what the module, a callback or a data set of another fit refers to.
"""

from __future__ import annotations

import tempfile
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
from flsv.retraining.coalition_fit import (
    FitOrder,
    become,
    coalition_loop,
    of_the_run,
    prepare_coalition_fit,
)
from flsv.retraining.global_model_scoring import GlobalModelScoring
from flsv.retraining.proof import difference
from flsv.retraining.readings import Reading, ReadingRefused
from flsv.retraining.train_fits import Fit, once_proved
from flsv.retraining.utility_store import LAST
from flsv.sampling import FullParticipation
from flsv.server.round_server import NoModel
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.own_files import own_view
from flsv.utilities.supervisor import ChildFailed, supervise

#: Name of the performance measure in a fit's result, if there is only one.
UTILITY = "utility"


@dataclass(frozen=True)
class Piece:
    """Request to a child process to train one coalition."""

    seed: int
    members: Members
    # Whether the answer contains the models before and after training.
    models: bool = False
    # Whether the untrained model is scored, too.
    scores_untrained: bool = False
    # Whether the fit starts from slightly changed weights, to measure the effect of rounding.
    nudged: bool = False
    # Whether callbacks that only watch a run or end it take part, since training reads them.
    watched: bool = False
    # A checkpoint for the trained module.
    save: Path | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Request to a child process to compute clients' values for s seeds. The outputs of untrained coalitions are
    predicted from those of trained ones.
    """

    seed: int
    # bool [K, n], the trained coalitions, the empty one first
    masks: Tensor
    # float64 [s, K, C], by C performance measures
    utilities: Tensor
    # [s, K - 1, V, ...], of all but the empty coalition
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class Predicted:
    """Clients' ``values`` from predicted outputs, for s seeds and C performance measures. ``disagreement`` is the
    difference between their two predictions. Both are float64 ``[s, n, C]``.
    """

    values: Tensor
    disagreement: Tensor
    # float64 [C, n, n], the covariance of the means over the seeds between draws of as many validation samples. NaN:
    # it is not known.
    case_covariance: Tensor


@dataclass(frozen=True, eq=False)
class Federation:
    """Trainer, module, data and performance measure of a federation before its fit."""

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
    rounds: int | None = None,
    run_time: tuple[float, float] | None = None,
) -> Fit | Predicted | ConfigurationError:
    """Process the request ``piece`` in this process. Return its result, or the ConfigurationError that it raised.

    Args:
        folder: for files that the fit writes.
        checkpoint: file whose weights are added to the result, for comparison.
        participation: with ``"all"`` all members of a coalition train in every round.
        rounds: number of rounds after which training ends. None: as the Trainer plans.
        run_time: from when to when the run has trained. Files that were changed then are not to be read.
    """
    if participation == "all":
        for callback in callbacks_of(federation.trainer):
            if is_loop(callback):
                become(callback, sampler=FullParticipation())
    try:
        if isinstance(piece, Prediction):
            return _predict(piece, federation)
        if rounds is None:
            rounds = int(federation.trainer.max_epochs or 0)
        order = FitOrder(
            piece.members,
            piece.seed,
            rounds=(rounds - 1,),
            nudged=piece.nudged,
            watched=piece.watched,
            scores_untrained=piece.scores_untrained,
            run_time=run_time,
        )
        return _train(piece, order, federation, folder, checkpoint)
    except ConfigurationError as error:
        return error


def _train(
    piece: Piece,
    order: FitOrder,
    federation: Federation,
    folder: str,
    checkpoint: Path | None,
) -> Fit:
    trainer = federation.trainer
    module = federation.module
    run_state: Any = None
    if checkpoint is not None:
        run_state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    if piece.save is None:
        _write_apart(trainer, folder)

    scoring = prepare_coalition_fit(
        trainer,
        federation.data,
        _measures_of(federation),
        order,
        folder,
    )
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, federation.data)
    fit = scoring.result().stored([LAST], piece.models)
    if piece.save is not None:
        trainer.save_checkpoint(piece.save, weights_only=True)

    if fit.model is None or run_state is None:
        return fit
    # The checkpoint's weights follow as a third model, to compare with.
    module.load_state_dict(run_state)
    run_model = scoring.space.read(module).cpu()
    models = [*fit.model, run_model]
    return replace(fit, model=torch.stack(models))


def _measures_of(federation: Federation) -> dict[str, Any]:
    """Return the performance measures by name."""
    measure = federation.measure
    if isinstance(measure, str | ModelScore):
        return {UTILITY: measure}
    return {name: name for name in measure}


def _write_apart(trainer: L.Trainer, folder: str) -> None:
    """Redirect this process's writes to memory, so that no coalition reads what another one has written."""
    view = tempfile.mkdtemp(dir=folder)
    with suppress(OSError):  # where a system gives a process no view of files of its own
        own_view([trainer.default_root_dir], view)


def _predict(piece: Prediction, federation: Federation) -> Predicted:
    callbacks: list[Any] = callbacks_of(federation.trainer)
    loop, measured = find_loop(callbacks), _Evaluator(federation)
    others = [each for each in callbacks if each is not loop and not of_the_run(each)]
    callbacks[:] = [measured, *others, coalition_loop(loop, loop.config.sampler, piece.seed)]
    federation.trainer.loggers = []
    federation.trainer.fit(federation.module, federation.data)
    return measured.predict(piece, loop.config.client_weights(federation.data.num_samples))


class _Evaluator(GlobalModelScoring):
    """Callback that makes a performance measure's evaluator, and ends the fit before training."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation.data, [federation.measure], None, rounds=())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop, trainer.fit_loop.min_epochs = True, 0

    def predict(self, piece: Prediction, weights: Tensor) -> Predicted:
        """Compute the clients' values that ``piece`` requests, given their ``weights [n]`` in the average. If all
        coalitions are trained, only their covariance.
        """
        (evaluator,), (measure,) = (
            self._evaluators,
            self._measures,
        )
        values_name = OutputScore.of(evaluator, measure)
        assert values_name is not None
        # The empty coalition's outputs, of this process's untrained model, only matter for the covariance.
        empty_outputs = torch.zeros_like(piece.outputs[:, :1])
        if self.untrained_scores[0].outputs is not None:
            empty_outputs[:] = self.untrained_scores[0].outputs
        outputs = torch.cat([empty_outputs, piece.outputs], 1)

        predictions = []
        for utilities, seed_outputs in zip(piece.utilities, outputs):
            predictions.append(
                values_name.shapley(
                    piece.masks,
                    utilities,
                    seed_outputs,
                    weights,
                )
            )

        measures = [measure] if isinstance(measure, str | ModelScore) else measure
        num_clients = len(weights)
        covariances = []
        for name in measures:
            score = OutputScore.of(evaluator, name)
            assert score is not None
            covariance = score.case_covariance(piece.masks, outputs, weights)
            if covariance is None:
                covariance = torch.full((num_clients, num_clients), torch.nan).double()
            covariances.append(covariance)
        return Predicted(
            values=torch.stack([prediction.values for prediction in predictions]),
            disagreement=torch.stack([prediction.disagreement for prediction in predictions]),
            case_covariance=torch.stack(covariances),
        )


class FitsInProcesses:
    """Trainer of coalitions in child processes, see :class:`flsv.retraining.train_fits.Fits`."""

    def __init__(
        self,
        task: Callable[[Piece | Prediction], Any],
        num_clients: int,
        jobs: int = 1,
        # After so many seconds a process is ended.
        limit_s: float | None = None,
        # The run's seed, with which the coalition of all clients must come to the weights of the run's checkpoint.
        proved_by: int | None = None,
        run: Callable[..., Iterator[tuple[Any, Any]]] = supervise,
    ) -> None:
        self._task = task
        self.at_once = jobs
        self._limit_s = limit_s
        self._proved_by = proved_by
        self._everybody = tuple(range(num_clients))
        self._supervise = run
        # Whether callbacks that only watch a run or end it take part.
        self._is_watched = False

    def fits(
        self, coalitions: Sequence[Members], seed: int
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        proof = self._everybody if coalitions and seed == self._proved_by else None
        yield from once_proved(self._fits(coalitions, seed, proof), proof)

    def predict(self, prediction: Prediction) -> Predicted:
        """Compute, in a child process, the clients' values that ``prediction`` requests."""
        ((_, answer),) = self._run({None: prediction})
        if isinstance(answer, ChildFailed):
            raise ConfigurationError(f"the outputs of coalitions could not be scored: {answer}")
        return answer  # type: ignore[no-any-return]

    def _fits(
        self, coalitions: Sequence[Members], seed: int, proof: Members | None
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        ordered = sorted(coalitions, key=lambda members: members != self._everybody)
        if proof is not None and proof not in ordered:
            ordered.insert(0, proof)

        pieces: dict[Members, Piece] = {}
        for members in ordered:
            # The untrained model is the same for all.
            is_first = not pieces
            pieces[members] = Piece(
                seed, members, models=members == proof, scores_untrained=is_first
            )
        for members, answer in self._run(pieces):
            if members == proof and isinstance(answer, Fit):
                self._prove(answer, seed)
            yield members, answer

    def _run(self, pieces: Mapping[Any, Piece | Prediction]) -> Iterator[tuple[Any, Any]]:
        """Process requests ``{key: request}`` in child processes, and yield ``(key, result)``. Raise a request's
        ConfigurationError.
        """
        remaining = dict(pieces)
        if self._is_watched:
            for key, piece in pieces.items():
                if isinstance(piece, Piece):
                    remaining[key] = replace(piece, watched=True)

        tasks = [(key, self._task(piece)) for key, piece in remaining.items()]
        for key, result in self._supervise(tasks, self.at_once, self._limit_s):
            if isinstance(result, ConfigurationError):
                raise result
            if isinstance(result, Reading):
                yield from self._run_watched(remaining, result)
                return
            del remaining[key]
            yield key, result

    def _run_watched(
        self,
        pieces: Mapping[Any, Piece | Prediction],
        reading: Reading,
    ) -> Iterator[tuple[Any, Any]]:
        """Train with all callbacks, since training reads one. Raise ReadingRefused if that is impossible."""
        if self._is_watched or not reading.can_take_part:
            raise ReadingRefused(reading)
        self._is_watched = True
        yield from self._run(pieces)

    def _prove(self, fit: Fit, seed: int) -> None:
        """Raise ConfigurationError if ``fit``, of the full coalition, does not reproduce the run's model."""
        assert fit.model is not None
        mine, start, run = fit.model

        def again(nudged: bool) -> tuple[Tensor, Tensor] | None:
            ((_, other),) = self._run(
                {None: Piece(seed, self._everybody, models=True, nudged=nudged)}
            )
            return (
                (other.model[1], other.model[0])
                if isinstance(other, Fit) and other.model is not None
                else None
            )

        share = difference(mine, run, start, again, fit.rounding)
        if share is not None:
            raise ConfigurationError(
                "there are no values: the coalition of all clients, trained again from the run's configuration, came "
                f"to another model than the run's last checkpoint ({100 * share:.2g} % of the way that training went "
                "lie between them). Code, data or packages have changed since, or its training does not follow from "
                "configuration and seed. Train the run again (flsv fit --config RUN/config.yaml), and retrain that."
            )
        self._proved_by = None
