"""Whether all ranks are about to run the same federation, found out before training time is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer

from flsv.engines.ranks.strategy import FederatedStrategy
from flsv.errors import ConfigurationError


def agree(
    trainer: L.Trainer, fingerprint: Mapping[str, Mapping[str, str]], seed: int, engine: Any = "sequential"
) -> int:
    """Compare the ranks' federations.

    Args:
        trainer: on any number of processes.
        fingerprint: of this rank's federation, see :func:`flsv.server.fingerprint.fingerprint`.
        seed: this rank's.
        engine: of the loop.

    Returns:
        The seed of all: rank 0's, which matters where none was given.

    Raises:
        ConfigurationError: ranks have other data, settings or numbers of rounds; something that cannot be right on
            several ranks.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, FederatedStrategy):
        return seed
    strategy.federation = True
    ranks = strategy.ranks
    if ranks.size == 1:
        return seed
    if engine != "sequential":
        raise ConfigurationError(
            f"FederatedLoop(engine=...) runs the clients elsewhere, and the trainer has {ranks.size} ranks: leave one "
            "of the two out."
        )
    if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "max_time (a Timer) would stop one rank in the middle of a round, by its own clock. Say max_epochs."
        )
    trains = {name: getattr(trainer, name) for name in ("max_epochs", "limit_train_batches", "limit_val_batches")}
    trains |= {"accumulate_grad_batches": trainer.accumulate_grad_batches, "precision": trainer.precision}
    settings = {**fingerprint["settings"], **{f"trainer.{name}": repr(value) for name, value in trains.items()}}
    told = {"settings": settings, "samples": fingerprint["samples"]}
    for rank, theirs in enumerate(ranks.everybody(told, "the federation")):
        _compare(told, theirs, ranks.rank, rank)
    return ranks.from_rank(0, seed, "the seed")


def _holder(name: str) -> str:
    return "the server's validation set" if name == "server" else f"client {name}"


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], rank: int, other: int) -> None:
    here, there = mine["settings"], theirs["settings"]
    differ = [
        f"{name} is {here.get(name)} on rank {rank} and {there.get(name)} on rank {other}"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise ConfigurationError(f"{'; '.join(differ)}. Start all ranks with the same configuration.")
    clients = [name for name in mine["samples"] if mine["samples"][name] != theirs["samples"].get(name)]
    if clients:
        who = [_holder(name) for name in clients[:5]]
        raise ConfigurationError(
            f"ranks {rank} and {other} have dealt out other data: {', '.join(who)}{', ...' * (len(clients) > 5)} hold "
            "other samples or labels. All ranks need the same data, and a source that splits at random a seed: "
            "seed_everything before the data module is made."
        )
