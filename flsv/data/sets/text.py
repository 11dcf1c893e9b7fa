"""Texts with classes, one a row of a CSV file, as hashed words.

Joulin, Grave, Bojanowski, Mikolov, "Bag of Tricks for Efficient Text Classification", EACL 2017: a text is the mean of
its words' vectors; Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009: a word's vector
is found by its hash, so that nobody has to collect a vocabulary, which would say what words which client has.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.arguments import check_number
from flsv.data.sets.csv_data import CSVData
from flsv.data.sets.csv_file import CSVFile
from flsv.data.sets.csv_values import class_labels, class_names, with_values

_WORD = re.compile(r"\w+")


def hashed_words(text: str, max_words: int) -> list[int]:
    """The text's first words as numbers in 1 .. 2^32 - 1: CRC-32 of their UTF-8, the same everywhere and always.

    A word is a run of letters, digits and underscores of any script; case and Unicode's compatible forms do not matter.

    Example:
        >>> hashed_words("Profit rose", 9), hashed_words("PROFIT, rose!", 1)
        ([4122618561, 2587067636], [4122618561])
    """
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())[:max_words]
    return [zlib.crc32(word.encode()) or 1 for word in words]


class TextData(CSVData):
    """The rows of a CSV file: a text, its class, and perhaps a column with the natural clients.

    Samples are ``(words int64 [max_words], class int64)``: the hashes of the text's first words, then zeros, as
    :class:`~flsv.models.FastText` takes them. Nothing is fitted to the texts. One without words is all zeros, and rows
    without a class are left out; there is a warning of either.

    Args:
        path: the file, looked up below ``root``, then as it is.
        text: the column with the texts.
        label: the column with the classes.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        max_words: how many words of a text count.
        options: see :class:`~flsv.data.CSVData`.

    Raises:
        ConfigurationError: from construction, arguments out of range; from ``setup``, a file that is no table, columns
            that it has not, a row without a group, labels that are no classes, a class that only the second file has.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> rows = 'ship,"a boat, a port"\\nearn,profit rose\\n' * 2
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "news.csv").write_text("label,text\\n" + rows)
        ...     data = TextData("news.csv", root=folder, max_words=4, val_fraction=0)
        ...     data.setup()
        >>> data.train_set.classes, data.train_set[1]
        (('earn', 'ship'), (tensor([4122618561, 2587067636,          0,          0]), tensor(0)))
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        label: str = "label",
        group: str | None = None,
        max_words: int = 200,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        check_number(self, "max_words", max_words, least=1, whole=True)
        self.text, self.label, self.max_words = text, label, max_words

    def encode(self, train: CSVFile, test: CSVFile | None) -> None:
        files = [with_values(file, self.label, "label") for file in (train, test) if file is not None]
        groups = self.read_groups(files[0])
        about = f"label {self.label!r}"
        labels = [[value.strip() for value in file.column(self.label, "label")] for file in files]
        names = class_names(files[0], labels[0], about)
        sets = [
            (self._words(file, file.column(self.text, "text")), class_labels(file, values, names, about))
            for file, values in zip(files, labels)
        ]
        self.keep(sets[0], self.split(len(files[0]), groups), groups, None if test is None else sets[1], names)
        self.input_shape = (self.max_words,)

    def _words(self, file: CSVFile, texts: Sequence[str]) -> Tensor:
        words = torch.zeros(len(texts), self.max_words, dtype=torch.long)
        for row, text in enumerate(texts):
            hashes = hashed_words(text, self.max_words)
            words[row, : len(hashes)] = torch.tensor(hashes, dtype=torch.long)
        empty = (words[:, 0] == 0).nonzero().flatten().tolist()
        if empty:
            rank_zero_warn(f"{file.path}: {len(empty)} of {len(texts)} texts have no words: {file.places(empty)}.")
        return words
