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
TEXTS = """label,desk,text
ship,sea,"A boat, ""a"" port"
earn,land,Profit rose
ship,sea,Größe 漢字
earn,land,loss
"""
TALES = f"""group,text
sea,"{FISH}"
wood,{WOLF}
sea,the sea
wood,a
"""


@pytest.fixture
def read_csv(tmp_path):
    """A function that makes and sets up a data module of a file with this text."""

    def write_and_set_up(kind, text, test_text=None, **options):
        path = tmp_path / "rows.csv"
        path.write_text(text, "utf-8")
        if test_text is not None:
            test_path = tmp_path / "test.csv"
            test_path.write_text(test_text, "utf-8")
            options["test_path"] = str(test_path)

        data = kind(str(path), **options)
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
    crcs_of_words = [zlib.crc32(word.encode()) for word in words]

    assert hashed_words(text, max_words=9) == crcs_of_words


def test_text_data_has_hashes_of_the_first_words_and_zeros_after_a_short_text(read_csv):
    data = read_csv(TextData, TEXTS, max_words=3)

    texts, _ = data.train_set.tensors
    (hash_of_loss,) = hashed_words("loss", max_words=3)
    assert texts[0].tolist() == hashed_words("a boat a", max_words=3)
    assert texts[3].tolist() == [hash_of_loss, 0, 0]


def test_group_column_of_text_data_names_the_clients(read_csv):
    texts = read_csv(TextData, TEXTS, group="desk")

    data = set_up_data(texts, GroupPartitioner(), server_val=0)

    counts_of_land, counts_of_sea = data.class_counts.tolist()
    assert data.client_names == ("land", "sea")
    assert data.class_names == ("earn", "ship")
    assert counts_of_land == [2, 0]
    assert counts_of_sea == [0, 2]


@pytest.mark.parametrize("length", [1, 3, 12])
def test_text_windows_predict_every_byte_at_most_once(length):
    text = "Größe 漢字"  # 14 bytes
    text_bytes = list(text.encode())

    text_windows = windows(text, length)

    positions = range(0, len(text_bytes) - length, length)
    expected_windows = [text_bytes[position : position + length + 1] for position in positions]
    assert text_windows.tolist() == expected_windows


def test_character_data_cuts_text_into_pieces(read_csv):
    length = 5

    train_set = read_csv(CharacterData, TALES, group="group", length=length).train_set

    (pieces,) = train_set.tensors
    num_fish_pieces = (len(FISH) - 1) // length
    num_wolf_pieces = (len(WOLF.encode()) - 1) // length
    first_piece_of_fish = bytes(pieces[0].tolist())
    second_piece_of_wolf = bytes(pieces[num_fish_pieces + 1].tolist())
    assert pieces.dtype == torch.int64
    # "the sea" has one piece, and "a" has none.
    groups = ["sea"] * num_fish_pieces + ["wood"] * num_wolf_pieces + ["sea"]
    assert train_set.groups.tolist() == groups
    # A piece ends with the first character of the next one.
    assert first_piece_of_fish == FISH.encode()[: length + 1]
    assert second_piece_of_wolf == WOLF.encode()[length : 2 * length + 1]


@pytest.mark.parametrize(
    ("kind", "text", "options", "message"),
    [
        (
            TextData,
            "label,desk,text\nship,sea,a\nearn, ,b\nship,sea,a\nearn, ,b\n",
            {"group": "desk"},
            r"line 3, 5: 2 of 4 rows have no value in 'desk' \(groups\)",
        ),
        (
            TextData,
            TEXTS,
            {"test_text": "label,desk,text\ncrude,sea,oil\n"},
            r"line 2: 'crude' in the target 'label', expected one of 2 classes",
        ),
        (
            CharacterData,
            TALES,
            {"group": "group", "length": 24},
            r"the texts of 'sea' in the column 'group' are shorter than a piece of 25 characters",
        ),
    ],
)
def test_csv_data_with_wrong_values_are_refused(read_csv, kind, text, options, message):
    with refused(message):
        read_csv(kind, text, **options)
