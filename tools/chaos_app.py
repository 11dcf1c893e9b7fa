"""What tools/chaos.py adds to a Flower project: sites that do wrong in rounds of a plan, a server that keeps a diary.

It is copied into the project as ``fedapp/trouble.py``; ``fedapp/plan.py`` holds the plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from fedapp.plan import PLAN  # type: ignore[import-not-found]
from flwr.app import Context, Message, RecordDict

from flsv.engines.flower import from_record, to_record

HERE = Path(PLAN["folder"])


def trouble(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of Flower: does what the plan says of this site and round."""
    packet = from_record(message.content)
    site, index = context.node_config["site"], packet.plain.get("round")
    what = PLAN["wrong"].get(f"{site} {index}") if packet.kind == "train" else None
    if what == "waits":
        wait(site, index)
    if what == "garbage":
        return Message(content=RecordDict(), reply_to=message)
    if what == "late":
        time.sleep(1.3 * PLAN["timeout"])
    if what == "fails":
        raise OSError("the disk is gone")
    reply = call_next(message, context)
    if what == "nan":
        answer = from_record(reply.content)
        answer.tensors["vector"][0] = float("nan")
        return Message(content=to_record(answer), reply_to=message)
    return reply


def wait(who: str, index: int) -> None:
    """In this round, until it may go on."""
    (HERE / f"{who} {index}").touch()
    until = time.monotonic() + 300
    while not (HERE / f"go on {index}").exists() and time.monotonic() < until:
        time.sleep(0.1)


class Diary(L.Callback):
    """Writes which process serves which round, when it begins; the plan may let it wait, too, as ``server``."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        with (HERE / "diary.txt").open("a") as book:
            book.write(f"{os.getpid()} {trainer.current_epoch}\n")
        if f"server {trainer.current_epoch}" in PLAN["wrong"]:
            wait("server", trainer.current_epoch)
