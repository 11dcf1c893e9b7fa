"""Data modules that read CSV files: a base class, texts with classes, and running text.

Texts become hashed words: a text is the mean of its words' vectors (Joulin, Grave, Bojanowski, Mikolov, "Bag of Tricks
for Efficient Text Classification", EACL 2017), and the vector of a word is found by the word's hash (Weinberger et al.,
"Feature Hashing for Large Scale Multitask Learning", ICML 2009). So no vocabulary has to be collected, which would
reveal the clients' words.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv.data.sources.places import find_place, looked_at
from flsv.tables.dictionary import Dictionary
from flsv.tables.source import classes_of, group_values, rows_with_target
from flsv.tables.table import Table, open_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


@checked
class CSVData(L.LightningDataModule):
    """Base class of data modules that read CSV files.

    Subclasses make samples of rows in :meth:`encode`. :class:`~flsv.data.Splits` holds out validation samples, as of
    any source.

    Args:
        path: path of the file, relative to ``$FLSV_DATA_ROOT`` (else ``data``) or, if it does not exist there, to the
            working folder.
        group: the column with the natural clients, such as hospitals. None: no such column.
        test_path: path of a second file with the same columns, for testing.
        batch_size: samples per batch.
        pos_label: the positive one of two classes, which gets the number 1. None: the larger number or ``True``.

    Attributes:
        train_set, test_set: the data sets, set by ``setup``. ``test_set`` is None without a second file. Their
            attributes are ``groups`` (the group of each sample), ``group_kind`` (the column's name) and ``classes``
            (the classes' names).
    """

    def __init__(
        self,
        path: str,
        group: str | None = None,
        *,
        test_path: str | None = None,
        batch_size: Count = 32,
        pos_label: str | bool | int | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.test_path = test_path
        self.group = group
        self.batch_size = batch_size
        self.pos_label = pos_label
        self.train_set: Any = None
        self.test_set: Any = None

    @abstractmethod
    def encode(self, rows: Table) -> TensorDataset:
        """Return the samples of a file's rows. It is called for the training file first."""

    def setup(self, stage: str | None = None) -> None:
        """Read the files at the first call."""
        if self.train_set is None:
            self.train_set = self.encode(self._read(self.path))
            if self.test_path is not None:
                self.test_set = self.encode(self._read(self.test_path))

    def _read(self, path: str) -> Table:
        file = find_place(path, root=None)
        if file is None:
            raise ConfigurationError(
                f"{path} was not found: looked at {looked_at(path, root=None)}. Set the path, or $FLSV_DATA_ROOT."
            )
        return open_table(file)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training samples."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Return batches of the test samples, or an empty list if there are none."""
        if self.test_set is None:
            return []
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def _with_groups(self, dataset: Any, groups: np.ndarray) -> Any:
        dataset.groups = groups
        dataset.group_kind = self.group
        return dataset


_WORD_PATTERN = re.compile(r"\w+")


def hashed_words(text: str, max_words: int) -> list[int]:
    """Hash a text's first ``max_words`` words to their CRC-32 in UTF-8, in 1 .. 2^32 - 1."""
    words = _WORD_PATTERN.findall(unicodedata.normalize("NFKC", text).casefold())[:max_words]
    return [zlib.crc32(word.encode()) or 1 for word in words]


@checked
class TextData(CSVData):
    """Data module of a CSV file with texts, their classes, and perhaps a column with the natural clients.

    Samples are ``(words int64 [max_words], class int64)``, as :class:`~flsv.models.FastText` takes them: the hashes of
    the text's first words, then zeros. Nothing is fitted to the texts. Rows without a class are excluded, with a
    warning.

    Args:
        path: path of the file, as of :class:`~flsv.tables.CSVData`.
        text: the column with the texts.
        label: the column with the classes.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        max_words: largest number of words of a text that are used.
        options: further arguments of :class:`~flsv.tables.CSVData`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> rows = 'ship,"a boat, a port"\\nearn,profit rose\\n' * 2
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "news.csv").write_text("label,text\\n" + rows)
        ...     data = TextData(f"{folder}/news.csv", max_words=4)
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
        max_words: Count = 200,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.text = text
        self.label = label
        self.max_words = max_words

    def encode(self, rows: Table) -> TensorDataset:
        rows = rows_with_target(rows, self.label)
        if self.train_set is None:
            classes = classes_of({"train": rows}, self.label, self.pos_label)
        else:
            classes = self.train_set.classes
        targets = Dictionary(self.label, classes=classes).targets(rows)
        text_column = rows.words(self.text, argument="text").astype(object)
        texts = text_column.fillna("").tolist()
        dataset: Any = TensorDataset(self._hashes_of(texts), torch.from_numpy(targets))
        dataset.classes = tuple(classes)  # the names of the classes are read from this attribute
        if self.group is not None:
            dataset = self._with_groups(dataset, group_values(rows, self.group))
        return dataset

    def _hashes_of(self, texts: Sequence[str]) -> Tensor:
        hashes = torch.zeros(len(texts), self.max_words, dtype=torch.long)
        for row, text in enumerate(texts):
            text_hashes = hashed_words(text, self.max_words)
            hashes[row, : len(text_hashes)] = torch.tensor(text_hashes, dtype=torch.long)
        return hashes


def windows(text: str, length: int) -> np.ndarray:
    """Cut a text's UTF-8 bytes into windows that overlap by one byte, uint8 ``[n, length + 1]``."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    count = max(len(data) - 1, 0) // length
    return data[np.arange(count)[:, None] * length + np.arange(length + 1)]


@checked
class CharacterData(CSVData):
    """Data module of a CSV file with documents, cut into pieces of ``length + 1`` characters, for a language model.

    Samples are ``(characters int64 [length + 1],)``, in 0 .. 255, and have no label. Characters are the bytes of UTF-8,
    so that no alphabet has to be collected. A character outside of ASCII counts as several. Pieces of one document may
    be in training and in validation samples.

    Args:
        path: path of the file, as of :class:`~flsv.tables.CSVData`.
        text: the column with the documents.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        length: number of characters that a sample predicts.
        options: further arguments of :class:`~flsv.tables.CSVData`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "tales.csv").write_text("group,text\\nsea,the fish and his wife\\nwood,a wolf\\n")
        ...     data = CharacterData(f"{folder}/tales.csv", group="group", length=5)
        ...     data.setup()
        >>> len(data.train_set), data.train_set.groups.tolist(), bytes(data.train_set[4][0].tolist())
        (5, ['sea', 'sea', 'sea', 'sea', 'wood'], b'a wolf')
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        group: str | None = None,
        length: Count = 64,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.text = text
        self.length = length

    def encode(self, rows: Table) -> TensorDataset:
        rows.check_has(self.text, "text")
        pieces_of_rows = [windows(text, self.length) for text in rows.frame[self.text]]
        pieces = np.concatenate(pieces_of_rows).astype(np.int64)
        dataset = TensorDataset(torch.from_numpy(pieces))
        if self.group is None:
            return dataset

        groups = group_values(rows, self.group)
        groups_of_pieces = np.repeat(groups, list(map(len, pieces_of_rows)))
        lost_groups = np.setdiff1d(groups, groups_of_pieces).tolist()
        if lost_groups:
            raise ConfigurationError(
                f"{rows.name}: the texts of {lost_groups[0]!r} in the column {self.group!r} are shorter than a piece "
                f"of {self.length + 1} characters. Lower length."
            )
        return self._with_groups(dataset, groups_of_pieces)
