"""What comes of each program of the zoo in a federation: the value, the warning or the refusal, by feature.

Tests of a feature are parametrized by the rows that say something of it, :func:`rows_with`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning.pytorch.callbacks import EarlyStopping

from flsv.sampling import UniformSampler
from helpers.data import toy_sets
from zoo import attributes, counters, hooks, logged, networks, optimizers, samples, scores, tasks
from zoo.program import Program, Sets, make_images, make_mlp_with_norm, with_three_clients


@dataclass(frozen=True)
class Row:
    """A program and its outcomes. One that is None or False is not tried.

    Attributes:
        program: what is fitted.
        by_hand: whether it trains as in the loop by hand, to the program's tolerance, and has the values by hand.
        retrained_by_hand: whether values by retraining are those of the loop by hand.
        resumes: whether a resumed fit is bitwise the uninterrupted one.
        keeps_buffers: whether buffers stay as they are until the first batch.
        update: whether a client's first update is its own, as if it trained alone, or depends on the clients before it.
        passes: what is named as passing from client to client.
        scored: whether scores by a logged value leave the training as it is, or are refused.
        retrained: whether coalitions are fits of their members, these with a warning that clients train otherwise in
            other company, or refused before training.
        refusal: what the refusals say.
        performance: by what coalitions are scored.
        alone: the fits of members to which coalitions are compared, if not the program's own.
    """

    program: Program
    by_hand: bool = False
    retrained_by_hand: bool = False
    resumes: bool = False
    keeps_buffers: bool = False
    update: Literal["own", "by company"] | None = None
    passes: str = ""
    scored: Literal["left alone", "refused"] | None = None
    retrained: Literal["right", "warned", "refused"] | None = None
    refusal: str = ""
    performance: str = "negative_loss"
    alone: Program | None = None


def of_task(task, **options):
    """A program of a task with its own samples."""
    return Program(partial(tasks.make_seeded, task), task.data, **options)


def of_state(module, update, **outcomes):
    """A module with a state, which scoring leaves alone."""
    return Row(with_three_clients(module), update=update, scored="left alone", **outcomes)


def early_stopping():
    return [EarlyStopping("val_loss", min_delta=0.5, patience=0)]


def called_back(make_callback, **options):
    return with_three_clients(callbacks=lambda: [make_callback()], **options)


AS_BY_HAND = {
    # 4 and 2 batches, with a step of the generator after every third: the client's own third.
    "wgan-spectral-norm": Row(
        Program(networks.GAN, make_images, clients=(3, 2), tolerance=5e-6),
        by_hand=True,
        retrained_by_hand=True,
        resumes=True,
        keeps_buffers=True,
    ),
    "byol": Row(
        Program(networks.BYOL, samples.make_views),
        by_hand=True,
        retrained_by_hand=True,
        resumes=True,
        keeps_buffers=True,
    ),
    "backbone-finetuning": Row(
        Program(networks.ThawsItsBackbone, make_images, networks.ThawsItsBackbone.make_callbacks),
        by_hand=True,
        resumes=True,
    ),
    # 5 and 2 batches: a window of one client's last batch must not end with the next one's first.
    "manual-accumulation": Row(
        Program(
            partial(optimizers.StepsByHand, make_mlp_with_norm, window=2),
            lambda: Sets(*toy_sets(samples=56, test=12)),
            clients=(5, 2),
        ),
        by_hand=True,
        retrained_by_hand=True,
    ),
    "vae": Row(of_task(tasks.VAE), by_hand=True, retrained_by_hand=True),
    "several-val-loaders": Row(
        of_task(tasks.SeveralLoaders, logged="val_loss/dataloader_idx_1"), by_hand=True
    ),
    "dictionaries": Row(of_task(tasks.Glue, logged="loss_all"), by_hand=True),
    "next-character": Row(of_task(tasks.LanguageModel, logged="val/perplexity"), by_hand=True),
    "hooks": Row(
        Program(hooks.UsesMostHooks, hooks.make_images_with_classes),
        by_hand=True,
        resumes=True,
        keeps_buffers=True,
    ),
    "dataloader-iter": Row(Program(hooks.FetchesItsBatches, make_images), by_hand=True),
    "odd-parts": Row(Program(attributes.HasOddParts, make_images), by_hand=True),
    "sparse-tensors": Row(
        Program(attributes.HasSparseMatrices, make_images),
        by_hand=True,
        retrained_by_hand=True,
        keeps_buffers=True,
    ),
}
STATES = {
    "a carried state and a deque": of_state(attributes.CarriesState, update="own"),
    "buffers and objects made in training": of_state(
        attributes.MakesStateInTraining, update="own", retrained="right"
    ),
    "an object with slots": of_state(counters.CountsInSlots, update="own"),
    "generators of four kinds": of_state(attributes.DrawsFromFourGenerators, update="own"),
    "a closure": of_state(
        counters.CountsInClosure,
        update="by company",
        passes="module.count_calls",
        retrained="warned",
    ),
    "a global": of_state(counters.CountsInGlobal, update="by company", retrained="warned"),
    "a counter of the class": of_state(
        counters.CountsInClass, update="by company", passes="CountsInClass.num_steps"
    ),
    "a temporary folder of `setup`": of_state(counters.CountsInFile, update="by company"),
    "an open file": Row(
        with_three_clients(counters.ReadsOpenFile),
        scored="refused",
        retrained="refused",
        refusal="the module.file .FileIO. cannot be",
    ),
    "a teacher in a list": of_state(
        networks.HasTeacherInList, update="by company", passes="module.teachers"
    ),
    "weights that are views": of_state(networks.HasFlatWeights, update="own", passes="module.flat"),
    "a hook of a layer, and hooks of the module": of_state(hooks.CountsInHooks, update="own"),
    "an optimizer that holds an object": of_state(
        optimizers.HasCountingOptimizer, update="own", passes="optimizers.0.meter"
    ),
    "bf16-mixed": Row(
        with_three_clients(trainer={"precision": "bf16-mixed"}),
        update="own",
        scored="left alone",
        retrained="right",
    ),
    "the Trainer's progress": of_state(counters.ReadsProgress, update="by company"),
    "torchmetrics in steps": of_state(
        attributes.TrainsByItsMetrics, update="by company", retrained="warned"
    ),
    "the logged validation loss": of_state(logged.TrainsByValidationLoss, update="own"),
    "the logged loss of a batch": of_state(logged.TrainsByLossOfLastBatch, update="by company"),
    "a weight set while validating": of_state(logged.WeighsWhileValidating, update="own"),
    "a structure that training changes": of_state(
        partial(networks.ChangesItself, *networks.CHANGES), update="own", retrained="right"
    ),
}
RUNS = {
    "samples with a generator": Row(
        with_three_clients(samples=samples.make_noisy_sets), retrained="right"
    ),
    "a callback that scales by its counts": Row(
        called_back(hooks.ScalesByItsCounts), retrained="warned"
    ),
    "a callback that acts if training is accurate": Row(
        called_back(hooks.ActsIfAccurate), retrained="right"
    ),
    "a callback that wraps a step": Row(
        called_back(hooks.WrapsTheOptimizersStep), retrained="right"
    ),
    "EMAWeightAveraging": Row(called_back(hooks.make_weight_averaging), retrained="right"),
    "EarlyStopping": Row(
        with_three_clients(callbacks=early_stopping, rounds=6),
        retrained="right",
        alone=with_three_clients(rounds=2),
    ),
    "a subclass of ModelCheckpoint": Row(
        called_back(hooks.WeighsAfterSaving, trainer={"enable_checkpointing": True}),
        retrained="right",
    ),
    "OneCycleLR with drawn cohorts": Row(
        with_three_clients(
            partial(optimizers.Scheduled, optimizers.cycle_once, interval="step"),
            loop=lambda: {"sampler": UniformSampler(2)},
            rounds=4,
        ),
        retrained="warned",
    ),
    "ReduceLROnPlateau by validation": Row(
        with_three_clients(
            partial(optimizers.Scheduled, optimizers.wait_for_plateau, monitor="val_loss"), rounds=5
        ),
        retrained="right",
    ),
    "clients that fail": Row(
        with_three_clients(
            scores.DivergesInRound2, loop=lambda: {"optimizer_state": "persist"}, rounds=4
        ),
        retrained="right",
    ),
    "average, outputs": Row(with_three_clients(scores.ValidatesWithAverage), retrained="right"),
    "temperature, logged": Row(
        with_three_clients(scores.TunesItsTemperature), retrained="right", performance="val_loss"
    ),
    "diverging members": Row(with_three_clients(scores.DivergesButForClient2), retrained="right"),
    "patience in validation steps": Row(
        with_three_clients(scores.CountsValidationSteps, rounds=6), retrained="right"
    ),
    "evaluations counted in the class": Row(
        with_three_clients(scores.CountsEvaluationsAtOnce), retrained="right"
    ),
    "evaluations counted in the class from round 3 on": Row(
        with_three_clients(scores.CountsEvaluations, rounds=4), retrained="right"
    ),
    "best weights of its own checkpoint": Row(
        with_three_clients(scores.EndsWithItsBest, rounds=4), retrained="right"
    ),
    "a counter and epochs of each client": Row(
        with_three_clients(scores.WarmsUp, loop=lambda: {"local_epochs": {"0": 1, "1": 3, "2": 2}}),
        retrained="right",
    ),
}
ROWS = {**AS_BY_HAND, **STATES, **RUNS}


def rows_with(feature, *outcomes):
    """Return the names of rows that say something of a feature, or one of these outcomes."""
    names = []
    for name, row in ROWS.items():
        outcome = getattr(row, feature)
        is_wanted = outcome in outcomes if outcomes else bool(outcome)
        if is_wanted:
            names.append(name)
    return names
