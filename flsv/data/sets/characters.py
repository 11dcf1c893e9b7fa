"""Running text, a document a row of a CSV file, cut into pieces for a language model of characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.data.sets.csv_data import CSVData
from flsv.data.sets.csv_file import CSVFile
from flsv.errors import ConfigurationError


def windows(text: str, length: int) -> np.ndarray:
    """A text's UTF-8 bytes in pieces that overlap by one: uint8 ``[n, length + 1]``.

    The first ``length`` of a piece are to predict the last ``length``, so every byte but the first is predicted once. A
    rest that fills no piece is left out.

    Example:
        >>> [bytes(piece).decode() for piece in windows("abcdefgh", 3)]
        ['abcd', 'defg']
    """
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    count = max(len(data) - 1, 0) // length
    return data[np.arange(count)[:, None] * length + np.arange(length + 1)]


class CharacterData(CSVData):
    """The documents of a CSV file as pieces of ``length`` characters and one more, for a language model.

    Samples are ``(characters int64 [length + 1],)``, in 0 .. 255, and have no label. Characters are the bytes of UTF-8:
    no alphabet has to be collected from the clients, no character is unknown, and one outside of ASCII counts as
    several. Validation and test samples are pieces, not whole documents: the same tale may be in both.

    Args:
        path: the file, looked up below ``root``, then as it is.
        text: the column with the documents.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        length: characters that a sample predicts.
        options: see :class:`~flsv.data.CSVData`.

    Raises:
        ConfigurationError: from construction, arguments out of range; from ``setup``, a file that is no table, columns
            that it has not, a row without a group, a group that is too short for one piece.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "tales.csv").write_text("group,text\\nsea,the fish and his wife\\nwood,a wolf\\n")
        ...     data = CharacterData("tales.csv", group="group", length=5, root=folder, val_fraction=0)
        ...     data.setup()
        >>> len(data.train_set), data.train_set.groups.tolist(), bytes(data.train_set[4][0].tolist())
        (5, ['sea', 'sea', 'sea', 'sea', 'wood'], b'a wolf')
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        group: str | None = None,
        length: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        check_number(self, "length", length, least=1, whole=True)
        self.text, self.length = text, length

    def encode(self, train: CSVFile, test: CSVFile | None) -> None:
        pieces, counts = self._pieces(train, train.column(self.text, "text"))
        groups = self.read_groups(train)
        of, lost = None, []
        if groups is not None:
            of = np.repeat(groups, counts)
            lost = np.setdiff1d(groups, of).tolist()
        if lost or not len(pieces):
            raise ConfigurationError(
                f"{train.path}: {f'the texts of {lost[0]!r} ({self.group})' if lost else 'all texts'} are too short "
                f"for a piece of {self.length + 1} characters. Lower length."
            )
        rest = None if test is None else (self._pieces(test, test.column(self.text, "text"))[0],)
        if test is not None and rest is not None and not len(rest[0]):
            raise ConfigurationError(
                f"{test.path}: all texts are too short for a piece of {self.length + 1} characters. Lower length."
            )
        self.keep((pieces,), self.split(len(pieces), of), of, rest)
        self.input_shape = (self.length + 1,)

    def _pieces(self, file: CSVFile, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Pieces int64 ``[n, length + 1]``, and how many each text has."""
        found = [windows(text, self.length) for text in texts]
        return torch.from_numpy(np.concatenate(found).astype(np.int64)), [len(pieces) for pieces in found]
