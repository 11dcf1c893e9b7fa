"""TrainingAfterTheRun: trains coalitions after the end of a run, for metrics that need the coalitions' models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop
from flsv._lightning.rounding import MAX_ROUNDING
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import OutputMeasure, favors_nobody
from flsv.games.members import Members, members_of
from flsv.metrics.coalitions.design import MAX_VALUED_ROUNDS, coalition_masks
from flsv.metrics.shadow import ShadowShapley
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_fit import metrics_in_use, only_watches_clients
from flsv.retraining.coalition_store import EARLIER_FOLDER, CoalitionStore
from flsv.retraining.coalitions_at_once import CoalitionsAtOnce
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun, KeptRun
from flsv.retraining.dry_run import DryRunResult
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.price import Choice
from flsv.retraining.progress import Progress
from flsv.retraining.proofs import ProofFailed
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.training_job import FitFailed, FitOutcome, FitResult, TrainingJob
from flsv.scores.performance import CLASSIFICATION, Measure, classifier_measure
from flsv.utilities.errors import ConfigurationError, NotBatched, listed
from flsv.values.coalition_files import Outputs, Training, measure_name, outputs_name
from flsv.values.query import Game

#: The largest number of output elements that are stored if all coalitions are trained. They then serve for the values'
#: standard errors only.
MAX_STORED_OUTPUTS = 2**24

_CHANGED_RUN = (
    "the training of coalitions has changed the run's own module or optimizers, which were restored. So "
    "coalitions share tensors with the run: let data sets and globals hold copies of the module's tensors"
)


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, Measure]:
    """Return the performance measures by which the metrics score coalitions' models, ``{name: measure}``."""
    measures = {measure_name(metric.measure): metric.measure for metric in metrics}
    # If one is a measure of a classifier, all of these are added, since flsv retrain reports shares by each of them.
    has_classification_measure = any(name in CLASSIFICATION for name in measures)
    if has_classification_measure:
        measures |= {name: classifier_measure(name) for name in CLASSIFICATION}
    return measures


class NoValues(Exception):
    """Error: there are no values, for the given reason, because models of coalitions are missing."""

    def __init__(self, reason: str, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


@dataclass(eq=False)
class TrainingAfterTheRun:
    """Training of coalitions after a run, for metrics that need the coalitions' models."""

    metrics: Mapping[str, ShadowShapley]
    #: The coalitions to train. It becomes :attr:`fallback` if these cannot be trained at once, as they should be.
    choice: Choice
    fallback: Choice | None
    store: CoalitionStore
    run_copy: CopyOfRun
    dry_run_result: DryRunResult
    #: A hash of the initial weights of a resumed run, from which coalitions must start, too. None: the run was not
    #: resumed.
    start_hash: str | None
    #: The index of a round, and the run's model ``[P]`` after it, which the coalition of all clients must reproduce.
    checked_round: int
    checked_model: Tensor | None
    space: ParameterSpace
    #: Sentences that say why the values may be wrong.
    consistency_warnings: list[str] = field(default_factory=list)
    _is_on_cpu: bool = False
    #: Clients that were trained at once with others and also alone, with the same models.
    witnesses: Sequence[Members] = ()
    #: Why coalitions were trained one by one although they were to be trained at once. Empty: they were not.
    why_not_at_once: str = ""
    # Whether a comparison in 64 bits leaves open whether a copy of the run trains as the run, see
    # :class:`CoalitionsAtOnce`.
    _doubts_copy: bool = False
    # The coalitions [K, n]. The first two are the empty coalition and that of all clients.
    _masks: Tensor = field(init=False)

    def train(self, run: MeasuredRun) -> Tensor:
        """Train the coalitions that are missing in the store, and return all coalitions, bool ``[K, n]``.

        Raises:
            NoValues: the training was interrupted, or the fit of a coalition has failed.
        """
        self._masks = coalition_masks(self.choice.design, run.data.num_clients)
        self._is_on_cpu = run.trainer.strategy.root_device.type == "cpu"
        if run.folder is not None:
            all_clients = tuple(range(run.data.num_clients))
            self.store.take_over(run.folder / EARLIER_FOLDER, Training(run.seed, all_clients))

        coalition_training = self._make_training(run)
        kept_run = KeptRun(run.trainer)
        try:
            self._train_or_explain(coalition_training, run)
        finally:
            has_changed_run = kept_run.restore()
            if has_changed_run:
                self.consistency_warnings.append(_CHANGED_RUN)

        for consistency_warning in self.consistency_warnings:
            rank_zero_warn(f"{', '.join(self.metrics)}: {consistency_warning}.")
        return self._masks

    def _train_or_explain(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """Train and compare, and turn an interruption and the failure of a fit into NoValues."""
        try:
            self._train_and_compare(training, run)
        except KeyboardInterrupt:
            done = self.store.progress(run.seed, self._coalitions_to_train())
            reason = f"The training of coalitions was interrupted: {done} are trained{_rest(run)}"
            raise NoValues(reason, interrupted=True) from None
        except ConfigurationError as error:  # raised as NoValues: the run itself has ended well
            advice = "flsv retrain trains the coalitions that are missing."
            raise NoValues(f"{error} {advice}") from error

    def _train_and_compare(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """Train the coalitions, and say in :attr:`consistency_warnings` how they differ from the run."""
        self._train_missing(training, run)
        self._compare_with_run(training, run)
        self._compare_first_updates(training, run.trainer)
        if training.changed_tensors:
            paths = listed(sorted(training.changed_tensors))
            self.consistency_warnings.append(
                f"training of coalitions has changed {paths}, which the program keeps outside of the module. So a "
                "coalition may have read changes that another coalition has made"
            )

    def _coalitions_to_train(self) -> list[Members]:
        """Return all coalitions except the empty one and that of all clients, whose models are the run's."""
        num_clients = self._masks.shape[1]
        coalitions = members_of(self._masks)
        return [members for members in coalitions if 0 < len(members) < num_clients]

    def _train_missing(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """Train the coalitions that are missing in the store, and then the complementary coalitions (halves) that the
        metric chooses by their outputs.
        """
        self._train_at_once(training, run)
        # The run's own two coalitions are missing if the run was killed before they were stored.
        self._train_all(training, run, members_of(self._masks), title="Groups of clients")
        halves = self._choose_halves(run)
        if len(halves):
            self._masks = torch.cat([self._masks, halves])
            coalitions = self._coalitions_to_train()
            self._train_all(training, run, coalitions, title="Halves of clients")

    def _train_at_once(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """If it is planned, train the coalitions at once. If they cannot be, let others be trained one by one."""
        if self.fallback is None:
            return
        coalitions = self._coalitions_to_train()
        at_once = CoalitionsAtOnce(
            training,
            self.store,
            self.run_copy,
            measures_of(self.metrics.values()),
            num_elements=self.space.size,
            models_of_run=self._models_of_run(run),
        )
        try:
            with self._progress(run, coalitions, title="Groups of clients") as progress:
                at_once.train(coalitions, progress)
            self.witnesses = at_once.witnesses
            self._doubt_copy(at_once.doubted_round(), run)
        except NotBatched as error:
            self._fall_back(error, run)

    def _fall_back(self, error: NotBatched, run: MeasuredRun) -> None:
        """Let coalitions be trained one by one. If all clients together have come to another model than the run, they
        are trained again up to this round.
        """
        rank_zero_info(
            f"flsv: groups of clients are trained one by one, since they cannot be trained at once: {error.reason}"
        )
        assert self.fallback is not None
        self.why_not_at_once = error.reason
        self.choice = self.fallback
        self._masks = coalition_masks(self.choice.design, run.data.num_clients)
        if isinstance(error, ProofFailed):
            self._doubt_copy(error.round_of_run, run)

    def _doubt_copy(self, round_of_run: int | None, run: MeasuredRun) -> None:
        """Let all clients be trained again up to this round, if there is one, or to the next one after which the run's
        model is known, to be compared with the run.
        """
        if round_of_run is None:
            return
        models = self._models_of_run(run)
        self._doubts_copy = True
        self.checked_round = min(index for index in models if index >= round_of_run)
        self.checked_model = models[self.checked_round]

    def _models_of_run(self, run: MeasuredRun) -> dict[int, Tensor]:
        """Return the run's models ``[P]`` by round that the coalition of all clients must reproduce."""
        if run.changes:
            return {}
        models = {self.store.rounds[-1]: run.federation.state.model()}
        if self.checked_model is not None:
            models[self.checked_round] = self.checked_model
        return models

    def _progress(self, run: MeasuredRun, coalitions: list[Members], title: str) -> Progress:
        missing = self.store.missing(run.seed, coalitions)
        num_fits = sum(map(bool, missing))  # without the empty coalition
        return Progress(run.trainer, num_fits, title)

    def _train_all(
        self, training: CoalitionTraining, run: MeasuredRun, coalitions: list[Members], title: str
    ) -> None:
        """Train those of ``coalitions`` that are missing in the store, with a bar that shows the progress."""
        with self._progress(run, coalitions, title) as progress:
            training.train(coalitions, self.store, progress)

    def _choose_halves(self, run: MeasuredRun) -> Tensor:
        """Return the halves that the metric chooses by the trained models' outputs, bool ``[K, n]``. K is 0 for other
        designs of coalitions.
        """
        metric = next(iter(self.metrics.values()))  # all metrics train the same coalitions
        game = game_of(metric, self._masks, self.store, run)
        if not isinstance(game.of_outputs, OutputMeasure):
            return self._masks[:0]
        return metric.next_coalitions(
            self._masks,
            self.store.scores(run.seed).outputs(game, self.store.rounds[-1]),
            logits=game.of_outputs.logits,
            names=run.data.client_names,
            seed=run.seed,
            halvings=self.choice.halvings,
        )

    def _make_training(self, run: MeasuredRun) -> CoalitionTraining:
        measures = measures_of(self.metrics.values())
        effects = {}
        for name, measure in measures.items():
            evaluator = run.games.evaluator_of(measure)
            if evaluator.effects is not None:
                effects[name] = evaluator.effects
        job = TrainingJob(
            members=tuple(range(run.data.num_clients)),
            seed=run.seed,
            rounds=tuple(self.store.rounds),
            effects=effects,
            validates=self.dry_run_result.needs_validations,
            keeps_checkpoints=self.dry_run_result.needs_checkpoints,
        )
        return CoalitionTraining(
            CopiedFits(self.run_copy, measures),
            job,
            num_samples=run.data.num_samples.tolist(),
            start_hash=self.start_hash,
        )

    def _compare_with_run(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """Check that the coalition of all clients reproduces the run's first rounds. If it does so only with
        validations, train all coalitions again with validations.
        """
        if run.changes:
            # The run's first rounds had other settings, so its model cannot be reproduced.
            self.consistency_warnings.append(_resumed_with_changes(run.changes))
            return
        # Each group of coalitions that train at once was compared.
        if self.choice.is_at_once and not self._doubts_copy:
            return
        ranks = ranks_of(run.trainer)
        comparison: tuple[str | None, bool] = None, False  # on other ranks than 0
        if ranks.rank == 0:
            comparison = self._repeat_rounds(training)
        difference, needs_validations = ranks.broadcast(
            0, comparison, "the comparison with the run"
        )
        if difference is not None:
            self.consistency_warnings.append(difference)
        if needs_validations:
            training.job = replace(training.job, validates=True)
            coalitions = self._coalitions_to_train()
            self.store.discard(run.seed, coalitions)
            training.train(coalitions, self.store)

    def _repeat_rounds(self, training: CoalitionTraining) -> tuple[str | None, bool]:
        """Return how the run's repeated rounds differ, and whether they differ only without validations."""
        difference = self._difference_by_repetition(training, training.job.validates)
        if difference is None or training.job.validates:
            return difference, False
        difference = self._difference_by_repetition(training, validates=True)
        return difference, difference is None

    def _compare_first_updates(self, training: CoalitionTraining, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        weighs_classes = isinstance(module, ClassifierClient) and module.is_balanced
        excludes_callbacks = any(metric.excluded_callbacks for metric in self.metrics.values())
        if weighs_classes or excludes_callbacks:
            return  # updates in coalitions differ by intention
        norms_of_run = _norms_of_first_updates(trainer)
        different_parameters = self._different_parameters(training, norms_of_run)
        if not different_parameters:
            return
        clients = listed(f"{client} ({name})" for client, name in different_parameters.items())
        self.consistency_warnings.append(
            f"clients train otherwise in the first round of coalitions than in that of the run: {clients}. "
            "Training depends on which other clients take part, or on data that pass from client to client outside of "
            "the module, such as in a global, a cache, a class attribute or a file"
        )

    def _different_parameters(
        self, training: CoalitionTraining, norms_of_run: Mapping[int, Tensor]
    ) -> dict[int, str]:
        """Return a parameter by client in which its first update in a coalition has another norm than in the run."""
        tolerance = 0.0 if self._is_on_cpu else MAX_ROUNDING
        parameter_by_client = {}
        for norms_by_client in training.first_updates.values():
            for client in norms_by_client.keys() & norms_of_run.keys():
                norms = norms_by_client[client]
                is_same = norms.isclose(norms_of_run[client], rtol=tolerance, atol=0.0)
                if not is_same.all():
                    first_difference = int(is_same.int().argmin())
                    parameter_by_client[client] = self.space.names[first_difference]
        return parameter_by_client

    def _difference_by_repetition(self, training: CoalitionTraining, validates: bool) -> str | None:
        """Train the run's first rounds by a coalition of all clients, with or without validations. Return a sentence if
        its model differs from the run's.
        """
        if self.checked_model is None:
            return None
        outcome = self._repeated(training, validates)
        num_rounds = self.checked_round + 1
        subject = f"the coalition of all clients, trained once more for {num_rounds} rounds"
        if isinstance(outcome, FitFailed):
            return f"{subject}, has failed ({outcome}), so it is not known whether coalitions are trained as the run is"
        difference = self._describe_difference(outcome, self.checked_model)
        if difference is None:
            return None
        return (
            f"{subject}, came to another model than the run ({difference}). Training, and so the values, depend on "
            "something outside of Trainer, module and callbacks, such as a global, a class attribute, an environment "
            "variable, a file or a data set that changes"
        )

    def _repeated(self, training: CoalitionTraining, validates: bool) -> FitOutcome:
        job = replace(
            training.job,
            rounds=(self.checked_round,),
            scores_rounds=False,
            model_rounds=(self.checked_round,),
            validates=validates,
        )
        try:
            results = dict(training.fits.train([job]))
        except ConfigurationError as error:
            # A warning is enough, since the coalitions themselves are trained.
            return FitFailed(str(error))
        return results[job]

    def _describe_difference(self, result: FitResult, expected_model: Tensor) -> str | None:
        """Describe how the model of a fit differs from ``expected_model [P]``. Return None if they are equal, or if
        they differ only by rounding on a GPU.
        """
        model = result.models.after_round[self.checked_round]
        initial_model = result.models.initial
        if not self._is_on_cpu and not torch.equal(model, expected_model):
            rounding = result.rounding
            unexplained = rounding.unexplained_distance(model, expected_model, initial_model)
            if unexplained is None:
                return None  # rounding alone explains the difference
        are_both_nan = model.isnan() & expected_model.isnan()
        differs = (model != expected_model) & ~are_both_nan
        if not differs.any():
            return None

        differs_by_name = self.space.unflatten(differs)
        different_names = [name for name, entries in differs_by_name.items() if entries.any()]
        distance = float((model - expected_model).double().norm())
        training_distance = float((expected_model - initial_model).double().norm())
        percent = 100 * distance / max(training_distance, 1e-30)
        return f"{percent:.2g} % of the way from the initial model to the run's, first in {different_names[0]!r}"


def game_of(metric: ShadowShapley, masks: Tensor, store: CoalitionStore, run: MeasuredRun) -> Game:
    """Return the game of a metric, of the coalitions ``masks [K, n]`` after those of the store's rounds in which the
    metric has values.
    """
    due_rounds = metric.rounds_to_value(store.rounds[-1] + 1)
    rounds = [round_index for round_index in store.rounds if round_index in due_rounds]
    of_outputs = None
    if outputs_name(metric.measure) in store.measures_with_outputs:
        of_outputs = run.games.output_measure(metric.measure)
    return metric.game(masks, rounds, weights=run.weights, of_outputs=of_outputs)


def open_store(
    run: MeasuredRun,
    metrics: Mapping[str, ShadowShapley],
    choices: Sequence[Choice | None],
    start_hash: str,
    # The outputs of one model, whose sizes are those of every model's outputs.
    outputs: Outputs,
) -> CoalitionStore:
    """Open the store of the coalitions that a run may train. Stored coalitions of other settings are removed."""
    measures_with_outputs: set[str] = set()
    for choice in filter(None, choices):
        masks = coalition_masks(choice.design, run.data.num_clients)
        measures_with_outputs |= _measures_with_outputs(
            run, metrics, masks, outputs, is_limited=not choice.is_at_once
        )
    return CoalitionStore(
        run.folder,
        list(measures_of(metrics.values())),
        settings={**_settings_of_training(run), "run": start_hash},
        ranks=ranks_of(run.trainer),
        outputs=measures_with_outputs,
    )


def _measures_with_outputs(
    run: MeasuredRun,
    metrics: Mapping[str, ShadowShapley],
    masks: Tensor,
    outputs: Outputs,
    is_limited: bool,
) -> set[str]:
    """Return the names of the measures of which the outputs of coalitions ``masks [K, n]`` are stored. If all are
    trained, ``is_limited`` excludes outputs that are large.
    """
    names: set[str] = set()
    if not favors_nobody(masks):  # values are computed from outputs for no other coalitions
        return names
    for metric in metrics.values():
        name = outputs_name(metric.measure)
        has_outputs = name in outputs and run.games.output_measure(metric.measure) is not None
        if not has_outputs:
            continue
        if not is_limited or _stores_outputs(metric, masks, outputs[name]):
            names.add(name)
    return names


def _resumed_with_changes(changes: Iterable[str]) -> str:
    return (
        f"the run was resumed with other settings ({'; '.join(changes)}), but coalitions are trained with the present "
        "settings from their first round on. So the values are only approximately those of the run. For exact values, "
        "start flsv fit with the present settings"
    )


def _norms_of_first_updates(trainer: L.Trainer) -> dict[int, Tensor]:
    """Return the norm of each parameter's first update in the run by client, from all ranks."""
    loop = find_loop(callbacks_of(trainer))
    norms_of_rank = loop.run.engine.first_updates
    norms_by_client: dict[int, Tensor] = {}
    for norms in ranks_of(trainer).all_gather(norms_of_rank, "the first updates"):
        norms_by_client |= norms
    return norms_by_client


def _stores_outputs(metric: ShadowShapley, masks: Tensor, outputs: Tensor) -> bool:
    """Return whether coalitions' outputs are stored, of which each model's are as large as ``outputs``."""
    num_coalitions, num_clients = masks.shape
    if num_coalitions < 2**num_clients:
        return True
    # If all coalitions are trained, outputs are stored for the values' standard errors only, if they are small.
    num_elements = num_coalitions * MAX_VALUED_ROUNDS * outputs.numel()
    return not metric.per_class and num_elements <= MAX_STORED_OUTPUTS


def _settings_of_training(run: MeasuredRun) -> dict[str, str]:
    """Return the run's settings on which training depends: all except those of metrics that no strategy reads, and of
    a client algorithm that only watches.
    """
    loop = find_loop(callbacks_of(run.trainer))
    names_in_use = [f"federation.metrics.{name}" for name in metrics_in_use(loop)]
    unused_prefixes = ["federation.metrics."]
    if only_watches_clients(loop):
        unused_prefixes.append("federation.client_algorithm")
    settings = {}
    for name, text in run.settings.items():
        is_used = not name.startswith(tuple(unused_prefixes)) or name in names_in_use
        if is_used:
            settings[name] = text
    return settings


def _rest(run: MeasuredRun) -> str:
    if run.folder is None:
        return ", and none is kept, because the run has no folder."
    return f", and kept in {run.folder}. flsv retrain trains the rest."
