"""Data modules of CSV files: tables with a column for clients, texts as hashed words, running text in pieces."""

import zlib

import numpy as np
import pytest
import torch

from flsv.data import CharacterData, GroupPartitioner, TableData, TextData
from flsv.data.sources.csv_data import hashed_words, windows
from flsv.utilities.errors import ConfigurationError
from helpers.data import set_up_data

WARDS = ("A", "B", "Größe")


NUM_PATIENTS = 40


def make_ward_lines():
    """A table in which whoever gets a higher dose is ill."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(NUM_PATIENTS):
        ward = WARDS[i % 3]
        age = rng.integers(20, 60)
        dose = rng.normal()
        if i % 7 == 0:
            age = "NA"
        sex = ["f", "m"][i % 2]
        note = ["", '"well, so far"', "plain"][i % 3]
        is_ill = int(dose > 0)
        lines.append(f"{ward},{age},{sex},{note},{dose:.3f},{is_ill}")

    return lines


FISH = "The fish, and his wife"
WOLF = "ein Wölfchen im Wald"
LENGTH = 5  # of the pieces of texts, whose next characters are predicted

#: Header, lines and arguments of each kind.
KINDS = {
    TableData: (
        "ward,age,sex,note,dose,ill",
        make_ward_lines(),
        {"target": "ill", "group": "ward"},
    ),
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
            options["test_path"] = "test.csv"

        arguments = {"root": str(tmp_path), **options_of_kind, **options}
        data = kind("rows.csv", **arguments)
        data.setup("fit")
        return data

    return write_and_set_up


def test_table_data_encodes_features_targets_and_groups(make_csv_data):
    data = make_csv_data(TableData, val_fraction=0.25, test_fraction=0.1)

    assert data.encoder.feature_names == (
        "age",
        "dose",
        "sex=f",
        "sex=m",
        "note=plain",
        "note=well, so far",
        "age missing",
        "note missing",
    )
    assert len(data.val_set) == 0.25 * NUM_PATIENTS
    assert len(data.test_set) == 0.1 * NUM_PATIENTS
    assert len(data.train_set) == NUM_PATIENTS - len(data.val_set) - len(data.test_set)
    assert data.num_classes == 2
    assert data.input_shape == (8,)
    assert data.group_names == WARDS

    x, y = data.train_set.tensors
    doses = x[:, 1]
    assert abs(doses.mean()) < 1e-6  # standardized by the training rows
    assert doses[y == 1].min() > doses[y == 0].max()  # the ill have the higher doses still


def test_table_splits_are_disjoint_and_follow_from_the_seed(make_csv_data):
    def load_doses(seed):
        data = make_csv_data(
            TableData,
            seed=seed,
            target="dose",
            columns={"task": "regression"},
            val_fraction=0.3,
            test_fraction=0.2,
        )
        parts = (data.train_set, data.val_set, data.test_set)
        return [part.tensors[1].tolist() for part in parts]

    doses = load_doses(0)
    all_doses = []
    for line in make_ward_lines():
        dose = line.split(",")[-2]
        all_doses.append(float(np.float32(dose)))

    # Of 40 rows 30 percent are for validation and 20 percent for testing.
    assert [len(part) for part in doses] == [20, 12, 8]
    assert sorted([*doses[0], *doses[1], *doses[2]]) == sorted(all_doses)
    assert load_doses(0) == doses
    assert load_doses(1) != doses


def test_table_data_standardizes_a_numeric_target(make_csv_data):
    test_line = "A,40,f,plain,0.5,1"
    data = make_csv_data(
        TableData,
        target="dose",
        columns={"task": "regression", "standardize_target": True},
        val_fraction=0.25,
        test_lines=[test_line],
    )

    targets = data.train_set.tensors[1]
    assert targets.mean().item() == pytest.approx(0, abs=1e-6)
    assert targets.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)

    standardized = data.test_set.tensors[1]
    restored = standardized * data.encoder.target_std + data.encoder.target_mean
    torch.testing.assert_close(restored, torch.tensor([0.5]))


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
    data = make_csv_data(TextData, max_words=3, val_fraction=0, group="desk")

    words, classes = data.train_set.tensors
    first_three_words = "a boat a"
    assert words[0].tolist() == hashed_words(first_three_words, 3)
    (loss,) = hashed_words("loss", 3)
    assert words[3].tolist() == [loss, 0, 0]
    assert classes.tolist() == [1, 0, 1, 0] * 3  # ship and earn in turn
    assert data.train_set.classes == ("earn", "ship")
    assert data.num_classes == 2
    assert data.input_shape == (3,)
    assert data.group_names == ("land", "sea")

    by_desk = set_up_data(data, GroupPartitioner(), server_val=0)
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
    data = make_csv_data(CharacterData, val_fraction=0)

    (pieces,) = data.train_set.tensors
    assert pieces.dtype == torch.int64
    assert data.input_shape == (6,)
    assert data.num_classes is None
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
            TableData,
            {"val_fraction": 0.6, "test_fraction": 0.4},
            "40 of 40 samples are to be held out",
        ),
        (
            TableData,
            {"lines": [*make_ward_lines(), " ,30,f,plain,0.1,1"]},
            r"1 of 41 rows have no 'ward' \(group\): line 42",
        ),
        (
            TextData,
            {"test_lines": ["crude,sea,oil"]},
            r"line 2: 'crude' in target 'label' is none of the 2 classes",
        ),
        (
            CharacterData,
            {"length": 24},
            r"the texts of 'sea' \(group\) are too short for a piece of 25 characters",
        ),
    ],
)
def test_csv_data_with_wrong_options_are_refused(make_csv_data, kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_csv_data(kind, **options)
