"""The benchmark's federations: what their files say, and what is said where something is wrong."""

import re
from pathlib import Path

import pytest
import yaml
from bench import main

from benchmark import federation, names
from benchmark.federation import FOLDER, Federation
from helpers import refused


def test_federations_of_digits_need_no_data_root(monkeypatch):
    monkeypatch.delenv("FLSV_DATA_ROOT", raising=False)
    digits = [federation(name) for name in names() if name.startswith("digits")]

    assert all(each_federation.available for each_federation in digits)
    assert digits[0].datamodule().num_clients == 6


SIGN_FLIP = {"class_path": "flsv.attacks.SignFlip", "init_args": {"clients": [9]}}


def write_digits_file(folder, **changes):
    """A file like that of the digits, with these sections; None takes one out."""
    sections = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text()) | changes
    path = folder / "mine.yaml"
    remaining = {name: value for name, value in sections.items() if value is not None}
    path.write_text(yaml.safe_dump(remaining))
    return str(path)


def test_federation_from_an_own_file_is_read(tmp_path):
    path = write_digits_file(tmp_path, rounds=3, title=None, set=None)

    digits = federation(path)
    digits.check()

    assert digits.name == "mine"
    assert digits.title == "mine"
    assert digits.rounds == 3
    assert digits.set == "held_out"


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"round": 3}, "mine.yaml is no federation: .*'round'"),
        ({"attacks": [SIGN_FLIP]}, "there is no client 9"),
        ({"performance": "val_loss"}, "mode"),
    ],
)
def test_federation_file_with_errors_is_refused_before_training(
    tmp_path, changes, match, monkeypatch
):
    path = write_digits_file(tmp_path, **changes)
    with refused(match):
        federation(path).check()

    monkeypatch.setattr("bench.make_truth", None)  # nothing is trained
    output_folder = str(tmp_path / "out")
    status = main(["--federations", path, "--metric", "cssv", "--out", output_folder])
    assert status == 2


def test_reference_page_of_federation_files_lists_every_key_and_its_example_is_valid(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "federations.md").read_text()
    keys = {
        key
        for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", cell)
    }

    assert keys == set(Federation.__dataclass_fields__) - {"name"}

    (example,) = re.findall(r"```yaml[^\n]*\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    federation(str(path)).check()
