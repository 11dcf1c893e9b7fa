"""Checks whether a run can be resumed from a checkpoint, before it is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
from torch.nn.parameter import is_lazy

from flsv._lightning.data_source import data_of
from flsv.configuration.identity import Identity, described, sample_hashes
from flsv.core.parameter_space import named_state
from flsv.data import FederatedDataModule
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import CHECKPOINT_FORMAT, check_format, warn_of_versions
from flsv.utilities.plain_values import digest

#: Hyper-parameters that select the network. If they differ, weights are not loaded even if all shapes agree.
NETWORK_OPTIONS = ("network", "network_args")


def check_checkpoint(
    trainer: L.Trainer,
    key: str,
    check_loop_state: Callable[[dict[str, Any], int | None], None],
    checkpoint: dict[str, Any],
    path: Any,
) -> None:
    """Check that the trainer can use a checkpoint that was read from ``path``. ``check_loop_state`` checks the loop's
    state, stored under ``key``."""
    callback_states = checkpoint.get("callbacks") or {}
    loop_state = callback_states.get(key)
    data = data_of(trainer)
    if trainer.state.fn == "fit":
        if not isinstance(loop_state, dict):
            raise ConfigurationError(
                f"{path} cannot be resumed, since it holds only weights or was not saved with a {key}. Name another "
                "checkpoint, or start a new run without ckpt_path."
            )
        check_loop_state(loop_state, trainer.max_epochs)
    elif trainer.state.fn == "validate" and isinstance(data, FederatedDataModule):
        _warn_of_other_samples(data, loop_state or {}, path)
    check_module(trainer.lightning_module, checkpoint, path)
    # Lightning would convert the module only after reading the weights, so double-precision weights would lose digits.
    trainer.precision_plugin.convert_module(trainer.lightning_module)


def _warn_of_other_samples(
    data: FederatedDataModule, loop_state: dict[str, Any], path: Any
) -> None:
    saved_identity = loop_state.get("identity")
    if saved_identity is not None and saved_identity["samples"] != sample_hashes(data):
        warnings.warn(
            f"the samples are partitioned differently than when {path} was trained, so it may have been trained on "
            "some of the samples on which it is validated.",
            stacklevel=3,
        )


def check_state(
    state: dict[str, Any], identity: Identity, seed: int | None, max_epochs: int | None
) -> None:
    """Check that the present fit can resume from a loop's saved ``state``."""
    check_format(
        "the checkpoint",
        state.get("format"),
        expected=CHECKPOINT_FORMAT,
        written_by=state.get("versions", {}).get("flsv"),
    )
    with refuse_incomplete():
        saved_identity = Identity(**state["identity"])
        saved_seed = state["seed"]
        rounds = state["round_index"]
        warn_of_versions("the checkpoint", state["versions"])

    changes = identity.differences(saved_identity)
    if changes:
        raise ConfigurationError(
            f"the checkpoint was saved by another federation: {'; '.join(changes)}. Resume with the settings and data "
            "with which the run was started, or start a new run without ckpt_path."
        )
    check_seed(seed, saved_seed)
    _check_rounds_left(rounds, max_epochs)


def _check_rounds_left(rounds: int, max_epochs: int | None) -> None:
    if max_epochs not in (None, -1) and rounds > max_epochs:
        raise ConfigurationError(
            f"the checkpoint was saved after round {rounds}, but max_epochs={max_epochs}, which includes these "
            f"rounds. Set max_epochs to more than {rounds}."
        )
    if rounds == max_epochs:
        _warn_that_all_is_run(rounds)


def check_rounds(trainer: L.Trainer, rounds: int) -> None:
    """Check that the ``rounds`` of a loop are those that its Trainer has run."""
    if rounds == 0:
        raise ConfigurationError(
            f"this Trainer has run {trainer.current_epoch} rounds, but its FederatedLoop has run none of them. Make a "
            "new Trainer."
        )
    if trainer.current_epoch != rounds:
        raise ConfigurationError(
            "this Trainer's last fit ended during a validation. Make a new Trainer, and resume."
        )
    if rounds == trainer.max_epochs:
        _warn_that_all_is_run(rounds)


def check_same_run(
    identity: Identity, last_identity: Identity, module: L.LightningModule, last_model: ModelHash
) -> None:
    """Check that a further fit of a Trainer has the settings, samples and weights with which its last one ended."""
    changes = identity.differences(last_identity)
    if model_hash(module, last_model.names) != last_model:
        changes.append(f"the weights of {type(module).__name__} have changed since that fit")
    if changes:
        raise ConfigurationError(
            f"this Trainer's last fit was another federation: {'; '.join(changes)}. Make a new Trainer and a new "
            "FederatedLoop for another run, such as the next fold of a cross-validation."
        )


def _warn_that_all_is_run(rounds: int) -> None:
    warnings.warn(
        f"all {rounds} rounds have been run already. Raise max_epochs to continue, or make a new Trainer for another "
        "run.",
        stacklevel=3,
    )


class ModelHash(NamedTuple):
    """Hash of a module's weights, and the names of its tensors."""

    names: Sequence[str]
    hash: bytes


def model_hash(module: L.LightningModule, names: Sequence[str]) -> ModelHash:
    """Compute the hash of the named tensors of a module, whatever their sizes."""
    tensors = {name: tensor for name, tensor in named_state(module) if not is_lazy(tensor)}
    return ModelHash(names, digest([tensors.get(name) for name in names]))


def requested_seed(seed: int | None) -> int | None:
    """Return a loop's seed, else that of ``seed_everything``, else None."""
    if seed is None and "PL_GLOBAL_SEED" in os.environ:
        return int(os.environ["PL_GLOBAL_SEED"])
    return seed


def check_seed(seed: int | None, seed_of_run: int) -> None:
    """Check that the seed of a fit is that of the continued run. None: the fit uses the run's seed."""
    if seed is not None and seed != seed_of_run:
        raise ConfigurationError(
            f"the seed is {seed}, but the run was started with {seed_of_run}, and a run's seed cannot be changed. Set "
            f"federation.seed={seed_of_run} (or seed_everything), or start a new run without ckpt_path."
        )


@contextmanager
def refuse_incomplete() -> Iterator[None]:
    """Convert a KeyError within this context into a ConfigurationError about an incomplete checkpoint."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(
            f"{error} is missing in the checkpoint's federation, so the checkpoint is incomplete. Name another one, or "
            "start a new run without ckpt_path."
        ) from error


def check_sharing(saved: Mapping[str, str] | None, present: Mapping[str, str]) -> None:
    """Check that the same parameters and buffers are shared as in the checkpoint."""
    if not saved:
        return
    saved_identity = Identity(saved, {})
    present_identity = Identity(present, {})
    differences = present_identity.other_settings(saved_identity, "{}, and was {}")
    if differences:
        raise ConfigurationError(
            f"the run is resumed with another shared part of the module ({'; '.join(differences)}). Freeze the same "
            "layers and set the same `share` as when the run was started."
        )


def check_module(module: L.LightningModule, checkpoint: dict[str, Any], path: Any) -> None:
    """Check that a checkpoint was saved with this network, not with another one of the same shapes."""
    saved_options = checkpoint.get("hyper_parameters", {})
    options = module.hparams
    for name in NETWORK_OPTIONS:
        if name not in saved_options or name not in options:
            continue
        value = described(options[name])
        saved_value = described(saved_options[name])
        if value != saved_value:
            raise ConfigurationError(
                f"{path} holds the weights of another network: {name} is {value} and was {saved_value}. Set the model "
                "options with which it was trained."
            )
