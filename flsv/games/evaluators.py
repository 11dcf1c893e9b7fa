"""The evaluators that metrics ask for, tried before the first round; and coalition games of rounds that no Trainer
runs, of a plain network and its loss, or of a LightningModule."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from flsv._lightning.evaluation import all_on_device, on_device
from flsv._lightning.validation import KeptBatches, ValidationRun, keep_batches
from flsv.core.parameter_space import ParameterSpace
from flsv.games.coalition import CoalitionGames
from flsv.games.evaluator import ModelEvaluator
from flsv.games.performance import ModelScore
from flsv.games.replica import VectorEvaluator, module_device
from flsv.games.validated import ValidatedModels, fresh_copy
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import isolated_rngs

#: In the names of what is better the less there is of it.
LESS = re.compile("loss|err|mse|mae|perplexity", re.IGNORECASE)
#: Under which a plain network's loss is measured.
LOSS = "loss"


def evaluators_of(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Mapping[str, Any],
    *,
    seed: int = 0,
) -> dict[Hashable, VectorEvaluator]:
    """Evaluators for all that is not a classifier's score, after a trial on the first batches.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        loaders: one or several validation loaders; they are read if there is anything to evaluate.
        measures: who asks, for messages, to what for; see :mod:`flsv.games.performance`.
        seed: of what a validation draws.

    Returns:
        By :attr:`flsv.games.ModelScore.evaluator`.

    Raises:
        ConfigurationError: something cannot be had: a name that is not logged, outputs that a metric does not take.
    """
    asked = {name: measure for name, measure in measures.items() if isinstance(measure, ModelScore)}
    if not asked:
        return {}
    with isolated_rngs(seed, "utility batches"):
        kept = keep_batches(trainer, loaders)
    evaluators: dict[Hashable, VectorEvaluator] = {}
    logged = {name: measure.of for name, measure in asked.items() if isinstance(measure.of, str)}
    if logged:
        names = list(dict.fromkeys(logged.values()))
        asking = {name: ", ".join(who for who, each in logged.items() if each == name) for name in names}
        derived = [measure.name for measure in asked.values() if measure.derived]
        by_validation = ValidatedModels(trainer, space, kept, names=names, derived=derived, asking=asking, seed=seed)
        by_validation.attempt()
        evaluators["logged"] = by_validation
    for name, measure in asked.items():
        if isinstance(measure.of, Metric):
            evaluators[measure.evaluator] = ModelEvaluator(
                trainer.lightning_module,
                space,
                _pairs(trainer, kept, name),
                metric=measure.of,
                context=trainer.strategy.precision_plugin.forward_context,
                seed=seed,
                asking=name,
            )
    return evaluators


def by_what_is_logged(trainer: L.Trainer, space: ParameterSpace, loaders: Any) -> str:
    """A sentence for whose outputs cannot be measured: what the module logs when it validates, and how to name it."""
    module = trainer.lightning_module
    try:
        with isolated_rngs(0, "utility"), torch.no_grad():
            first = [KeptBatches(islice(loader, 1)) for loader in keep_batches(trainer, loaders)]
            own = fresh_copy(module, space, space.read(module), {})
            logged = sorted(ValidationRun(trainer, own, first).logged())
    except Exception:  # whatever a validation raises: the error that is told of is another
        logged = []
    name = next((each for each in logged if not LESS.search(each)), logged[0] if logged else "val_loss")
    mode = "min" if LESS.search(name) else "max"
    what = f"what the module logs, {listed(logged, show=repr)}" if logged else "a value that validation_step logs"
    return (
        f" Or measure by {what}, of any batches and outputs: performance={name!r}, mode={mode!r} of a game; a loss is "
        "named by loss=... of GradientAgreement."
    )


def evaluator_on(
    evaluator: VectorEvaluator,
    trainer: L.Trainer,
    loader: Any,
    private: Callable[[], Mapping[str, Tensor]] | None = None,
) -> VectorEvaluator:
    """One of :func:`evaluators_of` on other batches; ``private`` gives state of the module that no vector holds."""
    kept = keep_batches(trainer, loader)
    if isinstance(evaluator, ModelEvaluator):
        return evaluator.on(_pairs(trainer, kept, "what clients are asked for"), private)
    assert isinstance(evaluator, ValidatedModels)
    return evaluator.on(kept, private)


def _pairs(trainer: L.Trainer, loaders: list[KeptBatches], asking: str) -> Iterator[tuple[Any, Any]]:
    """The batches ``(x, y)`` as the trainer's module would get them to validate on."""
    try:
        for index, loader in enumerate(loaders):
            yield from on_device(trainer, loader, index)
    except ConfigurationError as error:
        raise ConfigurationError(f"{asking}: a torchmetrics metric is given forward(x) and y. {error}") from error


class PlainModule(L.LightningModule):
    """A network, and its loss as what it logs when it validates."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, x: Any) -> Any:
        return self.module(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._loss is not None:
            x, y = batch
            self.log(LOSS, self._loss(self(x), y), batch_size=len(y))


def games_outside_fit(
    module: nn.Module,
    loader: Any,
    measures: Mapping[str, str | ModelScore],
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_classes: int | None = None,
) -> CoalitionGames:
    """Coalition games whose models are evaluated in copies of a module that no Trainer has.

    Args:
        module: a network, whose batches are pairs ``(x, y)``, or a LightningModule. It is read, not written.
        loader: the validation batches; a list of ``DataLoader`` is several loaders, any other one of batches.
        measures: who plays, for messages, to what for; see :mod:`flsv.games.performance`.
        loss: of a network: ``loss(module(x), y)``, a mean over the batch, which is measured as ``"loss"``.
        num_classes: M, of classifiers.

    Raises:
        ConfigurationError: something cannot be had: a value that is not logged, outputs that are no classes'.

    Example:
        >>> import torch
        >>> net = nn.Linear(1, 1, bias=False)
        >>> batches = [(torch.ones(2, 1), torch.ones(2, 1))]
        >>> measure = ModelScore("loss", "min")
        >>> games = games_outside_fit(net, batches, {"sv": measure}, nn.functional.mse_loss)
        >>> evaluate = games.evaluator_of(measure)
        >>> evaluate(torch.tensor([[1.0], [3.0]])).value("loss")
        tensor([0., 4.], dtype=torch.float64)
    """
    if isinstance(loader, list | tuple) and not all(isinstance(each, DataLoader) for each in loader):
        loader = KeptBatches(loader)  # Lightning takes a list for several loaders
    own: L.LightningModule
    if isinstance(module, L.LightningModule):
        if loss is not None:
            raise ConfigurationError(
                "loss=... is for plain modules: name what the LightningModule logs, performance='val_loss', mode='min'."
            )
        own = _detached(module)
    else:
        own = PlainModule(module, loss)
    inner = ParameterSpace(own)  # of another prefix, and the same order
    classifiers = any(isinstance(measure, str) for measure in measures.values())
    if isinstance(own, PlainModule) and all(isinstance(measure, str) for measure in measures.values()):
        return CoalitionGames(ModelEvaluator(own, inner, loader, num_classes=num_classes or 1))
    trainer = _trainer(own)
    evaluator = None
    if classifiers:
        try:
            evaluator = ModelEvaluator(own, inner, all_on_device(trainer, loader), num_classes=num_classes or 1)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{by_what_is_logged(trainer, inner, loader)}") from error
    return CoalitionGames(evaluator, validated=evaluators_of(trainer, inner, loader, measures))


def _detached(module: L.LightningModule) -> L.LightningModule:
    """The module without its Fabric, to which it would log; it shares all else."""
    own = copy.copy(module)
    own._fabric = None
    return own


def _trainer(module: L.LightningModule) -> L.Trainer:
    """One that validates on the module's device and says nothing."""
    device = module_device(module)
    accelerator = {"cuda": "gpu"}.get(device.type, device.type)
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        log.setLevel(before)
    trainer.strategy.connect(module)
    # The module's alone, which is a copy: its hooks ask the trainer whether it validates.
    module._trainer = trainer
    trainer._data_connector._datahook_selector = _DataHookSelector(module, None)
    trainer.state.fn = TrainerFn.FITTING
    return trainer
