"""Texts as hashed words."""

import zlib

import pytest
import torch

from flsv.data import FederatedDataModule, GroupPartitioner, Splits, TextData
from flsv.data.sources.csv_data import hashed_words
from flsv.errors import ConfigurationError

ROWS = ['ship,sea,"A boat, ""a"" port"', "earn,land,Profit rose", "ship,sea,Größe 漢字", "earn,land,loss"] * 3


@pytest.fixture
def make(tmp_path):
    def command(rows=ROWS, test=None, **options):
        for name, lines in (("news", rows), ("test", test)):
            if lines is not None:
                (tmp_path / f"{name}.csv").write_text("\n".join(["label,desk,text", *lines]), "utf-8")
        options = {"test_path": None if test is None else "test.csv", **options}
        data = TextData("news.csv", root=str(tmp_path), **options)
        data.setup()
        return data

    return command


def test_the_hash_is_crc_32():
    assert hashed_words("123456789", 1) == [0xCBF43926]  # the check value of the standard
    # A fullwidth A, case, and the underscore.
    found = hashed_words("\uff21 GRÖSSE größe ___", 9)
    assert found == [zlib.crc32(word.encode()) for word in ("a", "grösse", "grösse", "___")]
    assert hashed_words("don't--stop", 9) == [zlib.crc32(word.encode()) for word in ("don", "t", "stop")]
    assert hashed_words("one two three", 2) == hashed_words("one two", 9)
    assert hashed_words(" .,!", 9) == []


def test_samples(make):
    data = make(max_words=3, val_fraction=0, group="desk")
    words, classes = data.train_set.tensors
    assert words[0].tolist() == hashed_words("a boat a", 3)
    assert words[3].tolist() == [*hashed_words("loss", 3), 0, 0]
    assert words.dtype == torch.int64
    assert classes.tolist() == [1, 0, 1, 0] * 3
    assert data.train_set.classes == ("earn", "ship")
    assert (data.num_classes, data.input_shape, data.group_names) == (2, (3,), ("land", "sea"))
    federated = FederatedDataModule(data, GroupPartitioner(), splits=Splits(server_val=0))
    federated.setup("fit")
    assert federated.class_counts.tolist() == [[6, 0], [0, 6]]


def test_texts_without_words_are_zeros_and_it_is_said(make):
    with pytest.warns(UserWarning, match="2 of 14 texts have no words: line 14, 15"):
        data = make([*ROWS, "ship,sea,", "earn,land,..."], val_fraction=0)
    assert (data.train_set.tensors[0][12:] == 0).all()


def test_refused(make):
    for options, message in (
        ({"label": "topic"}, r"no column 'topic' \(label\)"),
        ({"text": "body"}, r"no column 'body' \(text\)"),
        ({"group": "office"}, r"no column 'office' \(group\)"),
        ({"label": "text", "rows": ROWS[:4]}, "4 different values in 4 rows, which are no classes"),
        ({"rows": ROWS[:1] * 4}, "1 different values in 4 rows"),
        ({"max_words": 0}, "of at least 1"),
        ({"test": ["crude,sea,oil"]}, r"test\.csv, line 2: 'crude' in label 'label' is none of the 2 classes"),
        ({"rows": ["ship,,a boat", *ROWS], "group": "desk"}, r"1 of 13 rows have no 'desk' \(group\): line 2"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make(**options)
