"""Data modules of CSV files: texts as hashed words, running text in pieces."""

import zlib

import pytest
import torch

from flsv.data import GroupPartitioner
from flsv.tables import CharacterData, TextData
from flsv.tables.csv_data import hashed_words, windows
from helpers import refused
from helpers.data import set_up_data

FISH = "The fish, and his wife"
WOLF = "ein Wölfchen im Wald"
LENGTH = 5  # of the pieces of texts, whose next characters are predicted

#: Header, lines and arguments of each kind.
KINDS = {
    TextData: (
        "label,desk,text",
        [
            'ship,sea,"A boat, ""a"" port"',
            "earn,land,Profit rose",
            "ship,sea,Größe 漢字",
            "earn,land,loss",
        ]
        * 3,
        {},
    ),
    CharacterData: (
        "group,text",
        [f'sea,"{FISH}"', f"wood,{WOLF}", "sea,the sea", "wood,a"],
        {"group": "group", "length": LENGTH},
    ),
}


@pytest.fixture
def make_csv_data(tmp_path):
    """A data module of these lines, or of its own kind's."""

    def write_and_set_up(kind, lines=None, test_lines=None, **options):
        header, lines_of_kind, options_of_kind = KINDS[kind]
        if lines is None:
            lines = lines_of_kind

        (tmp_path / "rows.csv").write_text("\n".join([header, *lines]), "utf-8")
        if test_lines is not None:
            (tmp_path / "test.csv").write_text("\n".join([header, *test_lines]), "utf-8")
            options["test_path"] = str(tmp_path / "test.csv")

        data = kind(str(tmp_path / "rows.csv"), **{**options_of_kind, **options})
        data.setup("fit")
        return data

    return write_and_set_up


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("\uff21 GRÖSSE größe ___", ["a", "grösse", "grösse", "___"], id="folded"),
        pytest.param("don't--stop", ["don", "t", "stop"], id="split"),
        pytest.param(" .,!", [], id="no words"),
    ],
)
def test_word_hashes_are_crc_32(text, words):
    expected = [zlib.crc32(word.encode()) for word in words]

    assert hashed_words(text, 9) == expected


def test_text_data_hashes_words_and_reads_classes(make_csv_data):
    data = make_csv_data(TextData, max_words=3, group="desk")

    words, classes = data.train_set.tensors
    first_three_words = "a boat a"
    assert words[0].tolist() == hashed_words(first_three_words, 3)
    (loss,) = hashed_words("loss", 3)
    assert words[3].tolist() == [loss, 0, 0]
    assert classes.tolist() == [1, 0, 1, 0] * 3  # ship and earn in turn
    assert data.train_set.classes == ("earn", "ship")

    by_desk = set_up_data(data, GroupPartitioner(), server_val=0)
    assert by_desk.client_names == ("land", "sea")
    assert by_desk.class_names == ("earn", "ship")
    earn_only, ship_only = by_desk.class_counts.tolist()  # of land and sea
    assert earn_only == [6, 0]
    assert ship_only == [0, 6]


@pytest.mark.parametrize("length", [1, 3, 12])
def test_text_windows_predict_every_byte_at_most_once(length):
    text = "Größe 漢字"  # 14 bytes
    data = list(text.encode())

    text_windows = windows(text, length)

    starts = range(0, len(data) - length, length)
    assert text_windows.tolist() == [data[at : at + length + 1] for at in starts]


def test_character_data_cuts_text_into_pieces(make_csv_data):
    data = make_csv_data(CharacterData)

    (pieces,) = data.train_set.tensors
    assert pieces.dtype == torch.int64
    fish_pieces = (len(FISH) - 1) // LENGTH
    wolf_pieces = (len(WOLF.encode()) - 1) // LENGTH
    expected_groups = ["sea"] * fish_pieces + ["wood"] * wolf_pieces + ["sea"]
    assert data.train_set.groups.tolist() == expected_groups
    # A piece ends with the first character of the next one.
    assert bytes(pieces[0].tolist()) == FISH.encode()[: LENGTH + 1]
    assert bytes(pieces[fish_pieces + 1].tolist()) == WOLF.encode()[LENGTH : 2 * LENGTH + 1]

    by_group = set_up_data(data, GroupPartitioner(), server_val=0)
    assert by_group.class_counts.tolist() == [[5], [4]]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            TextData,
            {"lines": ["ship,sea,a", "earn, ,b"] * 2, "group": "desk"},
            r"line 3, 5: 2 of 4 rows have no value in 'desk' \(groups\)",
        ),
        (
            TextData,
            {"test_lines": ["crude,sea,oil"]},
            r"line 2: 'crude' in the target 'label', expected one of 2 classes",
        ),
        (
            CharacterData,
            {"length": 24},
            r"the texts of 'sea' in the column 'group' are shorter than a piece of 25 characters",
        ),
    ],
)
def test_csv_data_with_wrong_options_are_refused(make_csv_data, kind, options, message):
    with refused(message):
        make_csv_data(kind, **options)
