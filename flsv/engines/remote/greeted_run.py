"""GreetedRun: what a site holds the server of a run to, from its first message on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flsv.engines.remote.messages import Packet, Refused, checked_int
from flsv.utilities.atomic_files import replacing

#: What the first message of a run that has it decides for all later ones.
PINNED_NAMES = ("client", "clients", "name", "classes")


class GreetedRun:
    """A run as a site has been greeted for it: who the site is in it, and what it has answered.

    Example:
        >>> import tempfile
        >>> plain = {"greeting": "0123456789abcdef", "client": 1}
        >>> run = GreetedRun(Path(tempfile.mkdtemp()), plain)
        >>> run.pin(plain)
        >>> run.pin({**plain, "client": 2})
        Traceback (most recent call last):
            ...
        flsv.engines.remote.messages.Refused: it was greeted as client 1 of this run, and is asked now as 2
    """

    def __init__(self, folder: Path, plain: Mapping[str, Any]) -> None:
        greeting = str(plain.get("greeting"))
        if not re.fullmatch(r"[0-9a-f]{16}", greeting):
            raise Refused(f"{greeting!r:.80} names no greeting: expected 16 hexadecimal digits")
        self.greeting = greeting
        self._path = folder / "greetings" / f"{greeting}.json"

    def pin(self, plain: Mapping[str, Any]) -> None:
        """Raise Refused if a message says otherwise than earlier ones who the site is."""
        pins = {}
        for name in PINNED_NAMES:
            if plain.get(name) is not None:
                pins[name] = plain[name]
        with self._entries() as entries:
            pinned = entries["pinned"]
            if not pinned:
                words = f"a server greets as the run {self.greeting}: {pins!r:.400}"
                rank_zero_info(f"flsv: {words}")
            for name, value in pins.items():
                if value != pinned.setdefault(name, value):
                    raise Refused(
                        f"it was greeted as {name} {pinned[name]!r:.80} of this run, and is asked now as {value!r:.80}"
                    )

    def answer_once(
        self,
        question: str,
        packet: Packet,
        times: float = 1,
        after_training: bool = False,
    ) -> None:
        """Raise Refused if other messages have asked this question in the round already, ``times`` times.

        Args:
            question: the question's name.
            packet: the message.
            times: how often the question may be asked in a round, each time otherwise.
            after_training: whether this site must have trained in the round.
        """
        rounds = checked_int(packet.plain, "rounds", maximum=math.inf, minimum=1)
        # The run's end is asked about with the number after the last round's.
        round_index = checked_int(packet.plain, "round", maximum=rounds)
        message = packet.digest.hex()
        with self._entries() as entries:
            if rounds > entries["rounds"] > 0:
                words = f"the run {self.greeting} has {rounds} rounds now, more than before"
                rank_zero_warn(f"flsv: {words}.")
            entries["rounds"] = max(rounds, entries["rounds"])
            has_trained = round_index - entries["trained"] in (0, 1)
            if after_training and not has_trained:
                raise Refused(f"{question!r:.120} is asked after a training, and there was none")
            answered = entries["answered"].setdefault(f"{round_index:d}", {})
            messages = answered.setdefault(question, [])
            if message in messages:  # sent again, as after a kill
                return
            if len(messages) >= times:
                raise Refused(
                    f"it has answered {question!r:.120} in round {round_index + 1}, and was asked otherwise now"
                )
            messages.append(message)

    def begin_round(self, round_index: int) -> None:
        """Let the questions of a round be asked again, since the site trains in it, for the first time or anew."""
        with self._entries() as entries:
            entries["trained"] = round_index
            entries["answered"].pop(f"{round_index:d}", None)

    @contextmanager
    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield the file's entries, and write them at the end, unless an error is raised."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock"):  # other processes of the site answer, too
            entries: dict[str, Any] = {
                "pinned": {},
                "answered": {},
                "trained": -2,
                "rounds": 0,
            }
            text = ""
            if self._path.is_file():
                text = self._path.read_text()
                entries = json.loads(text)
            yield entries
            new_text = json.dumps(entries)
            if new_text != text:
                with replacing(self._path, private=True) as file:
                    file.write(new_text.encode())
