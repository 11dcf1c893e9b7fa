"""Callbacks of users' own, as a configuration names them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L


class WithoutArguments(L.Callback):
    """Does nothing, and has no arguments."""


class WritesBesideItsLog(L.Callback):
    """Writes a file into the folder of its logger after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        folder = Path(trainer.log_dir, "own")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{trainer.current_epoch}.txt").write_text("")


class WithTexts(L.Callback):
    """Has arguments of all types that take a text."""

    def __init__(
        self,
        text: str = "",
        text_or_nothing: str | None = None,
        number_or_text: int | float | bool | str | None = None,
        list_or_text: list[int] | dict[str, int] | str = "",
        texts: Sequence[str] = (),
        numbers_or_texts: tuple[int | str, ...] = (),
        by_name: dict[str, Any] | None = None,
        anything: Any = None,
        without_type=None,
        callback: L.Callback | None = None,
        number: float = 0.0,
        codes: Sequence[int | str] = ("-999", "null"),
    ):
        self.arguments = {name: value for name, value in locals().items() if name != "self"}
        self.arguments.pop("__class__", None)
