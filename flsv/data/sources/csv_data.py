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

from flsv.data.labels import chooses_rarer_class
from flsv.data.sources.places import find_place, looked_at
from flsv.data.splits import Part
from flsv.data.tables.cells import Cells, read_cells
from flsv.data.tables.dictionary import Dictionary
from flsv.data.tables.source import classes_of, group_values, rows_with_target
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


@checked
class CSVData(L.LightningDataModule):
    """Base class of data modules that read CSV files.

    Subclasses turn the rows into data sets in :meth:`encode`.

    Args:
        path: path of the file, relative to ``root`` or, if it does not exist there, to the working folder.
        group: the column with the natural clients, such as hospitals. None: no such column.
        root: folder of the files. None: ``$FLSV_DATA_ROOT``, else ``data``.
        test_path: path of a second file with the same columns, for testing.
        batch_size: samples per batch.
        val_fraction: share of the first file's samples for validation. 0: no validation set.
        test_fraction: share of the first file's samples for testing, without ``test_path``. 0: no test set.
        pos_label: the positive one of two classes, which gets the number 1. None: the larger number, ``True``,
            or else the rarer one.
        seed: seed of the choice of validation and test samples. None: the seed of ``seed_everything``.

    Attributes:
        train_set, val_set, test_set: the data sets, set by ``setup``, or None for a set without samples.
            ``train_set.groups`` has the group of each sample, ``train_set.group_kind`` the column's name,
            ``train_set.classes`` the classes' names.
        group_names: the groups in the order in which :class:`~flsv.data.GroupPartitioner` makes clients of them.
        input_shape: shape of one sample.
        num_classes: number of classes, or None for data without classes.
    """

    def __init__(
        self,
        path: str,
        group: str | None = None,
        *,
        root: str | None = None,
        test_path: str | None = None,
        batch_size: Count = 32,
        val_fraction: Part = 0.1,
        test_fraction: Part = 0.0,
        pos_label: str | bool | int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.test_path = test_path
        self.root = root
        self.group = group
        self.batch_size = batch_size
        self.seed = seed
        self.pos_label = pos_label
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.train_set: Any = None
        self.val_set: Any = None
        self.test_set: Any = None
        self.group_names: tuple[str, ...] = ()
        self.input_shape: tuple[int, ...] | None = None
        self.num_classes: int | None = None

    @abstractmethod
    def encode(self, train: Cells, test: Cells | None) -> None:
        """Create the data sets from the files' rows, and store them by :meth:`store_datasets`.

        Called once by ``setup``.

        Args:
            train: rows of the first file.
            test: rows of the test file, if any.
        """

    def setup(self, stage: str | None = None) -> None:
        """Read the files at the first call."""
        if self.train_set is None:
            test = None if self.test_path is None else self._read(self.test_path)
            self.encode(self._read(self.path), test)

    def _read(self, path: str) -> Cells:
        file = find_place(path, self.root)
        if file is None:
            raise ConfigurationError(
                f"{path} was not found: looked at {looked_at(path, self.root)}. Set root."
            )
        return read_cells(file)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training samples."""
        generator = generator_for(self.seed, "csv", "order")
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, generator=generator
        )

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Return batches of the validation samples, or an empty list if there are none."""
        return self._eval_loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Return batches of the test samples, or an empty list if there are none."""
        return self._eval_loader(self.test_set)

    def _eval_loader(self, dataset: Any) -> DataLoader[Any] | list[DataLoader[Any]]:
        if dataset is None:
            return []
        return DataLoader(dataset, batch_size=max(self.batch_size, 256))

    def groups_of(self, table: Cells) -> np.ndarray | None:
        """Return the group of each row, ``[N]``, or None without a column of groups."""
        return None if self.group is None else group_values(table, self.group)

    def split(self, samples: int, groups: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return ``{"train": indices, "val": indices, "test": indices}``, a random division of samples.

        At least one sample of each of the ``groups [N]`` is for training.
        """
        generator = generator_for(self.seed, "csv", "split")
        order = torch.randperm(samples, generator=generator).numpy()
        if groups is None:
            groups = np.zeros(samples, dtype=int)
        # The first sample of each group in this order stays for training.
        _, first_positions = np.unique(groups[order], return_index=True)
        first_of_groups = order[first_positions]
        divisible = order[~np.isin(order, first_of_groups)]

        num_test = 0
        if self.test_path is None:
            num_test = int(self.test_fraction * samples + 0.5)
        num_val = int(self.val_fraction * samples + 0.5)  # halves are rounded up, here and above
        num_held_out = num_test + num_val
        if num_held_out > len(divisible):
            raise ConfigurationError(
                f"{type(self).__name__}: {num_held_out} of {samples} samples are to be held out, but one of each of "
                f"the {len(first_of_groups)} groups has to stay for training. Lower val_fraction or test_fraction."
            )
        train_indices = np.concatenate([first_of_groups, divisible[num_held_out:]])
        return {
            "train": np.sort(train_indices),
            "val": np.sort(divisible[num_test:num_held_out]),
            "test": np.sort(divisible[:num_test]),
        }

    def store_datasets(
        self,
        tensors: Sequence[Tensor],
        splits: dict[str, np.ndarray],
        *,
        groups: np.ndarray | None,
        test_tensors: Sequence[Tensor] | None,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Create the data sets, and store them in the attributes ``train_set``, ``val_set`` and ``test_set``.

        Args:
            tensors: inputs and targets of the samples in the first file.
            splits: the result of :meth:`split`: indices of the samples of ``train``, ``val`` and ``test``.
            groups: group of each sample, or None without groups.
            test_tensors: inputs and targets of the test file, or None without one.
            classes: names of the classes, or None without classes.
        """
        datasets: dict[str, Any] = dict.fromkeys(splits)  # None for an empty split
        for name, rows in splits.items():
            if len(rows) > 0:
                indices = torch.from_numpy(rows)
                datasets[name] = TensorDataset(*(tensor[indices] for tensor in tensors))
        self.train_set = datasets["train"]
        self.val_set = datasets["val"]
        self.test_set = datasets["test"]
        if test_tensors is not None:
            self.test_set = TensorDataset(*test_tensors)

        self.input_shape = tuple(tensors[0].shape[1:])
        if groups is not None:
            self.train_set.groups = groups[splits["train"]]
            self.train_set.group_kind = self.group
            self.group_names = tuple(map(str, np.unique(groups)))
        if classes is not None:
            self.train_set.classes = tuple(classes)
            # Whether the positive class is the rarer one, since the user named none.
            self.train_set.chose_rarer_class = chooses_rarer_class(classes, self.pos_label)
            self.num_classes = len(classes)


_WORD_PATTERN = re.compile(r"\w+")


def hashed_words(text: str, max_words: int) -> list[int]:
    """Hash a text's first ``max_words`` words to their CRC-32 in UTF-8, in 1 .. 2^32 - 1."""
    words = _WORD_PATTERN.findall(unicodedata.normalize("NFKC", text).casefold())[:max_words]
    return [zlib.crc32(word.encode()) or 1 for word in words]


@checked
class TextData(CSVData):
    """Data module of a CSV file's rows: a text, its class, and perhaps a column with the natural clients.

    Samples are ``(words int64 [max_words], class int64)``: the hashes of the text's first words, then zeros, as
    :class:`~flsv.models.FastText` takes them. Nothing is fitted to the texts. A text without words is all zeros. Rows
    without a class are left out, with a warning.

    Args:
        path: path of the file, as of :class:`~flsv.data.CSVData`.
        text: the column with the texts.
        label: the column with the classes.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        max_words: largest number of words of a text that are used.
        options: further arguments of :class:`~flsv.data.CSVData`.

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
        max_words: Count = 200,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.text = text
        self.label = label
        self.max_words = max_words

    def encode(self, train: Cells, test: Cells | None) -> None:
        train = rows_with_target(train, self.label)
        groups = self.groups_of(train)
        classes = classes_of({"train": train}, self.label, self.pos_label)
        dictionary = Dictionary(self.label, classes=classes)
        test_tensors = None
        if test is not None:
            test_tensors = self._tensors(dictionary, rows_with_target(test, self.label))
        tensors = self._tensors(dictionary, train)
        splits = self.split(len(train), groups)
        self.store_datasets(
            tensors, splits, groups=groups, test_tensors=test_tensors, classes=classes
        )

    def _tensors(self, dictionary: Dictionary, table: Cells) -> tuple[Tensor, Tensor]:
        words = table.words(self.text, "text").astype(object)
        texts = words.fillna("").tolist()
        return self._words(texts), torch.from_numpy(dictionary.targets(table))

    def _words(self, texts: Sequence[str]) -> Tensor:
        words = torch.zeros(len(texts), self.max_words, dtype=torch.long)
        for row, text in enumerate(texts):
            hashes = hashed_words(text, self.max_words)
            words[row, : len(hashes)] = torch.tensor(hashes, dtype=torch.long)
        return words


def windows(text: str, length: int) -> np.ndarray:
    """Cut a text's UTF-8 bytes into windows that overlap by one, uint8 ``[n, length + 1]``."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    count = max(len(data) - 1, 0) // length
    return data[np.arange(count)[:, None] * length + np.arange(length + 1)]


@checked
class CharacterData(CSVData):
    """Data module of a CSV file's documents, cut into ``length + 1`` characters each, for a language model.

    Samples are ``(characters int64 [length + 1],)``, in 0 .. 255, and have no label. Characters are the bytes of UTF-8:
    no alphabet has to be collected, and a character outside of ASCII counts as several. Validation and test
    samples are pieces: one document may be in both.

    Args:
        path: path of the file, as of :class:`~flsv.data.CSVData`.
        text: the column with the documents.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`.
        length: number of characters that a sample predicts.
        options: further arguments of :class:`~flsv.data.CSVData`.

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
        length: Count = 64,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.text = text
        self.length = length

    def encode(self, train: Cells, test: Cells | None) -> None:
        pieces, num_pieces_of_rows = self._cut_into_pieces(train)
        groups = self.groups_of(train)
        groups_of_pieces = None
        if groups is not None:
            groups_of_pieces = np.repeat(groups, num_pieces_of_rows)
            lost_groups = np.setdiff1d(groups, groups_of_pieces).tolist()
            if lost_groups:
                raise ConfigurationError(
                    f"{train.name}: the texts of {lost_groups[0]!r} ({self.group}) are too short for a piece of "
                    f"{self.length + 1} characters. Lower length."
                )
        test_tensors = None
        if test is not None:
            test_pieces, _ = self._cut_into_pieces(test)
            test_tensors = (test_pieces,)
        splits = self.split(len(pieces), groups_of_pieces)
        self.store_datasets((pieces,), splits, groups=groups_of_pieces, test_tensors=test_tensors)

    def _cut_into_pieces(self, file: Cells) -> tuple[Tensor, list[int]]:
        """Cut the texts into windows. Return these, int64 ``[n, length + 1]``, and each text's number of windows."""
        file.check_has(self.text, "text")
        texts = file.texts(self.text)
        windows_of_texts = [windows(text, self.length) for text in texts]
        pieces = np.concatenate(windows_of_texts).astype(np.int64)
        return torch.from_numpy(pieces), list(map(len, windows_of_texts))
