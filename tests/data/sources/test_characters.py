"""Running text in pieces."""

import pytest
import torch

from flsv.data import CharacterData, FederatedDataModule, GroupPartitioner, Splits
from flsv.data.sources.csv_data import windows
from flsv.errors import ConfigurationError

ROWS = ['sea,"The fish, and his wife"', "wood,ein Wölfchen im Wald", "sea,the sea", "wood,a"]


@pytest.fixture
def make(tmp_path):
    def command(rows=ROWS, **options):
        (tmp_path / "tales.csv").write_text("\n".join(["group,text", *rows]), "utf-8")
        data = CharacterData("tales.csv", **{"root": str(tmp_path), "group": "group", "length": 5, **options})
        data.setup()
        return data

    return command


@pytest.mark.parametrize("length", [1, 3, 10, 11, 12])
def test_every_byte_but_the_first_is_predicted_at_most_once(length):
    text = "Größe 漢字"  # 14 bytes
    found = windows(text, length)
    data = list(text.encode())
    expected = [data[at : at + length + 1] for at in range(0, len(data) - length, length)]
    assert found.tolist() == expected
    predicted = [byte for piece in found.tolist() for byte in piece[1:]]
    assert predicted == data[1 : 1 + len(predicted)]
    assert len(data) - 1 - len(predicted) < length


def test_samples(make):
    data = make(val_fraction=0)
    (pieces,) = data.train_set.tensors
    assert pieces.dtype == torch.int64
    assert data.input_shape == (6,)
    assert data.num_classes is None
    assert data.train_set.groups.tolist() == ["sea"] * 4 + ["wood"] * 4 + ["sea"]
    assert bytes(pieces[0].tolist()) == b"The fi"
    assert bytes(pieces[4].tolist()) == "ein Wö".encode()[:6]
    assert bytes(pieces[5].tolist()) == "ein Wölfchen".encode()[5:11]
    federated = FederatedDataModule(data, GroupPartitioner(), splits=Splits(server_val=0))
    federated.setup("fit")
    assert federated.num_samples.tolist() == [5, 4]
    assert federated.class_counts.shape == (2, 1)
    (batch,) = next(iter(federated.client_loader(1)))
    assert batch.shape == (4, 6)


def test_refused(make):
    for options, message in (
        ({"text": "tale"}, r"no column 'tale' \(text\)"),
        ({"length": 0}, "of at least 1"),
        ({"length": 24}, r"the texts of 'sea' \(group\) are too short for a piece of 25 characters"),
        ({"length": 99, "group": None}, "all texts are too short"),
        ({"rows": [*ROWS, ",no group"]}, "1 of 5 rows have no 'group'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make(**options)
