"""Checks of whether a run can be resumed from a checkpoint, before any is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L

from flsv.configuration.identity import Identity, described, sample_hashes
from flsv.data import FederatedDataModule
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import READABLE_CHECKPOINTS, check_format, warn_of_versions

#: Hyper-parameters that select the network. If they differ, weights are refused even if all shapes agree.
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
    data = getattr(trainer, "datamodule", None)
    if trainer.state.fn == "fit":
        if not isinstance(loop_state, dict):
            raise ConfigurationError(
                f"{path} holds weights only, or was not saved by a {key}: it can be tested, not resumed. Name another, "
                "or start a new run without ckpt_path."
            )
        check_loop_state(loop_state, trainer.max_epochs)
    elif trainer.state.fn == "validate" and isinstance(data, FederatedDataModule):
        saved_identity = (loop_state or {}).get("identity")
        if saved_identity is not None and saved_identity["samples"] != sample_hashes(data):
            warnings.warn(
                f"the data are dealt out otherwise than when {path} was trained: it may have been trained on some of "
                "the samples that it is validated on.",
                stacklevel=2,
            )
    check_module(trainer.lightning_module, checkpoint, path)
    # Lightning converts the module after it has read the weights, when those in double precision have lost digits.
    trainer.precision_plugin.convert_module(trainer.lightning_module)


def check_state(
    state: dict[str, Any], identity: Identity, seed: Any, max_epochs: int | None
) -> None:
    """Check that the present fit can resume from a loop's saved ``state``."""
    check_format(
        "the checkpoint",
        state.get("format"),
        readable=READABLE_CHECKPOINTS,
        written_by=state.get("versions", {}).get("flsv", state.get("version")),
    )
    with refuse_incomplete():
        versions = state["versions"]
        saved_identity = Identity(**state["identity"])
        saved_seed = state["seed"]
        rounds = state["round_index"]
    warn_of_versions("the checkpoint", versions)
    if state.get("finetuned") is not None:
        raise ConfigurationError(
            "the checkpoint is of flsv 2.0 and of a finetuning callback, the frozen layers of which only that version "
            "reads. Finish the run with it, or start a new one."
        )

    changes = identity.differences(saved_identity)
    if changes:
        raise ConfigurationError(
            f"the checkpoint is of another federation: {'; '.join(changes)}. Resume with what the run was started "
            "with, or start a new one without ckpt_path."
        )
    if seed is not None and int(seed) != saved_seed:
        raise ConfigurationError(
            f"the seed is {seed} and was {saved_seed} when the run was started, from which every choice of its rounds "
            f"derives: it cannot be changed. Give federation.seed={saved_seed} (or seed_everything), or start a new "
            "run without ckpt_path."
        )
    if max_epochs not in (None, -1) and rounds > max_epochs:
        raise ConfigurationError(
            f"the checkpoint is of round {rounds}, and max_epochs={max_epochs} counts these rounds, too: "
            f"say more than {rounds}."
        )
    if rounds == max_epochs:
        warnings.warn(
            f"all {rounds} rounds are run already: raise max_epochs to go on.", stacklevel=2
        )


@contextmanager
def refuse_incomplete() -> Iterator[None]:
    """Convert a KeyError within this context into a ConfigurationError about an incomplete checkpoint."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(
            f"the checkpoint's federation lacks {error}: it is not as it was saved. Name another, or start a new run "
            "without ckpt_path."
        ) from error


def check_sharing(
    saved: Mapping[str, str] | None,
    present: Mapping[str, str],
) -> None:
    """Check that the same entries of the module are shared as in the checkpoint."""
    if not saved:
        return
    saved_identity = Identity(saved, {})
    present_identity = Identity(present, {})
    differences = present_identity.other_settings(saved_identity, "{}, and was {}")
    if differences:
        raise ConfigurationError(
            f"the run is resumed with another part of the module shared ({'; '.join(differences)}). What is frozen, "
            "and what share says, must be what the run was started with."
        )


def check_module(
    module: L.LightningModule,
    checkpoint: dict[str, Any],
    path: Any,
) -> None:
    """Check that a checkpoint is of this network, not of another with the same shapes."""
    saved_options = checkpoint.get("hyper_parameters", {})
    options = module.hparams
    for name in NETWORK_OPTIONS:
        if name not in saved_options or name not in options:
            continue
        value = described(options[name])
        saved_value = described(saved_options[name])
        if value != saved_value:
            raise ConfigurationError(
                f"{path} holds the weights of another network: {name} is {value} and was {saved_value}. Give the model "
                "the options that it was trained with."
            )
