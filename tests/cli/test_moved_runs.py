"""Folders of runs that were moved, renamed or copied: what is found in them is theirs."""

import os
import shutil

import pytest
import torch

import flsv
from flsv.cli.checkpoints import default_checkpoints, find_checkpoint
from flsv.federation import FederatedLoop
from helpers import refused
from helpers.fits import fit, plain_trainer
from helpers.models import LogsByRound

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*holds rounds of an earlier run", "ignore:The dirpath has changed"
)
#: Accuracies after each round. The best rounds of the two runs differ.
SCORES = [0.1, 0.8, 0.5, 0.6, 0.9]
OTHER_SCORES = [0.7, 0.2, 0.3, 0.1, 0.1]
LAST = "checkpoints/last.ckpt"
BEST = "checkpoints/best.ckpt"


def train_run(folder, scores, seed=0, **options):
    options.setdefault("callbacks", default_checkpoints([]))
    loop = FederatedLoop(seed=seed)
    module = LogsByRound("val_accuracy", scores)
    fit(loop, folder, module, enable_checkpointing=True, **options)


def find_file(folder, word):
    trainer = plain_trainer(folder)
    return find_checkpoint(word, trainer)


def read_epoch(checkpoint):
    return torch.load(checkpoint, weights_only=True)["epoch"]


def read_rounds(folder):
    return flsv.read_run(folder)["round"].unique().tolist()


@pytest.fixture(scope="module")
def moved_projects(tmp_path_factory):
    """Folder of a run in ``archive`` that was trained in ``project``, where another run is now."""
    folder = tmp_path_factory.mktemp("projects")
    train_run(folder / "project", SCORES)
    shutil.move(folder / "project", folder / "archive")
    train_run(folder / "project", OTHER_SCORES, seed=1)
    return folder


@pytest.mark.parametrize("newest", [BEST, LAST])
def test_checkpoints_of_a_copied_run_are_found_whichever_is_newest(
    moved_projects, tmp_path, newest
):
    copy = tmp_path / "copy"
    shutil.copytree(moved_projects / "archive", copy)
    os.utime(copy / newest, (2e9, 2e9))
    assert find_file(copy, "last") == copy / LAST
    assert find_file(copy, "best") == copy / BEST


@pytest.fixture(scope="module")
def resumed_run(moved_projects, tmp_path_factory):
    """A moved run of three rounds that was resumed for a fourth one, which is not its best."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    train_run(folder, SCORES, rounds=4, ckpt_path=moved_projects / "archive" / LAST)
    return folder


def test_moved_run_is_resumed_with_its_own_values(moved_projects, resumed_run):
    table = flsv.read_run(resumed_run)
    is_of_first_part = table["round"] < 3
    first_part = flsv.read_run(moved_projects / "archive")

    assert read_rounds(resumed_run) == [0, 1, 2, 3]
    assert table[is_of_first_part]["value"].tolist() == first_part["value"].tolist()


def test_resumed_run_that_is_moved_has_the_best_checkpoint_of_its_first_part(resumed_run, tmp_path):
    moved_run = shutil.copytree(resumed_run, tmp_path / "moved")
    best_checkpoint = find_file(moved_run, "best")

    best_round = SCORES.index(max(SCORES[:4]))
    assert best_checkpoint == moved_run / BEST
    assert read_epoch(best_checkpoint) == best_round


def test_resumed_run_that_improves_saves_no_checkpoint_in_its_former_folder(
    moved_projects, tmp_path
):
    best_of_other_run = moved_projects / "project" / BEST
    content = best_of_other_run.read_bytes()
    run = tmp_path / "renamed"
    shutil.copytree(moved_projects / "archive", run)
    train_run(run, SCORES, rounds=5, ckpt_path=run / LAST)

    assert best_of_other_run.read_bytes() == content
    best_round = SCORES.index(max(SCORES))
    assert read_epoch(find_file(run, "best")) == best_round
    assert read_rounds(run) == [0, 1, 2, 3, 4]


def test_checkpoint_in_the_folder_of_another_run_is_not_resumed(moved_projects, tmp_path):
    mixed = tmp_path / "mixed"
    checkpoint = mixed / LAST
    shutil.copytree(moved_projects / "project", mixed)
    shutil.copy(moved_projects / "archive" / LAST, checkpoint)

    with refused("mixed holds the results of another run than"):
        train_run(mixed, SCORES, rounds=4, ckpt_path=checkpoint)
