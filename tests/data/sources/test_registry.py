"""Names, paths, and what is said to a name nobody knows."""

import numpy as np
import pytest

from flsv.data import load_image_data
from flsv.data.sources.named import KINDS, known_as
from flsv.errors import ConfigurationError


@pytest.fixture
def archive(tmp_path):
    split = {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4) % 2}
    np.savez(tmp_path / "xrays.npz", **{f"{s}_{k}": v for s in ("train", "test") for k, v in split.items()})
    return tmp_path / "xrays.npz"


@pytest.mark.parametrize("name", ["digits", "Digits", "DIGITS"])
def test_names_in_any_case(name):
    assert load_image_data(name).num_classes == 10


@pytest.mark.parametrize("name", ["fashion_mnist", "FashionMNIST", "fashion-mnist", "CIFAR10", "cifar-100"])
def test_torchvisions_names_in_any_spelling(name, tmp_path):
    assert known_as(name) in KINDS
    with pytest.raises(ConfigurationError, match="download: true"):
        load_image_data(name, str(tmp_path))


def test_files_below_root_and_elsewhere(archive, monkeypatch):
    assert len(load_image_data("xrays.npz", root=str(archive.parent)).train) == 4
    assert len(load_image_data(str(archive), root="elsewhere").train) == 4
    monkeypatch.chdir(archive.parent)
    assert len(load_image_data("xrays.npz", root="elsewhere").train) == 4


def test_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigurationError, match=r"No data set 'xrays.npz' was found") as caught:
        load_image_data("xrays.npz", root=str(tmp_path))
    assert str(tmp_path / "xrays.npz") in str(caught.value)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigurationError, match=r"No data set 'imagenet' was found\. Known are digits, mnist, fashion_mnist, cif"
    ):
        load_image_data("imagenet")


@pytest.mark.parametrize(
    ("typo", "meant"), [("fasion_mnist", "fashion_mnist"), ("CIFAR-1O", "cifar10"), ("digit", "digits")]
)
def test_a_typo_gets_a_suggestion(typo, meant):
    with pytest.raises(ConfigurationError, match=f"Did you mean '{meant}'"):
        load_image_data(typo)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("digits")
    for name, root in (("notes.txt", tmp_path), (str(tmp_path / "notes.txt"), "data")):
        with pytest.raises(ConfigurationError, match=r"notes.txt' was found"):
            load_image_data(name, str(root))
