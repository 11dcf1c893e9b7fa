"""The positive class: which of two classes it is."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedLoop, Reporting
from flsv.configuration.identity import fit_identity
from flsv.data import IIDPartitioner, OneClient
from flsv.metrics import LeaveOneOut
from flsv.results.record import read_record
from flsv.scores.performance import check_positive_class, performance_of, title_of
from flsv.tables import TextData
from flsv.tables.command import describe_positive_class
from helpers import refused
from helpers.data import set_up_data
from helpers.fits import fit


def make_arrays(seed):
    """Sixty inputs and words, of which one in five is ja."""
    is_ja = np.arange(60) % 5 == 0
    inputs = np.random.default_rng(seed).normal(size=(60, 3)) + is_ja[:, None]
    return inputs, np.where(is_ja, "ja", "nein")


def make_data(**options):
    clients = {"Boston": make_arrays(0), "Lyon": make_arrays(1), "Osaka": make_arrays(2)}
    return set_up_data(clients=clients, val=make_arrays(3), **options)


def fit_with_values(folder, data):
    torch.manual_seed(0)
    module = ClassifierClient("softmax", optimizer=partial(torch.optim.SGD, lr=0.5))
    metrics = {
        "loo": LeaveOneOut(performance="average_precision"),
        "f1": LeaveOneOut(performance="f1"),
    }
    loop = FederatedLoop(metrics=metrics, seed=0, reporting=Reporting(table=False))
    fit(loop, folder, module, data, rounds=2)

    return loop


def test_score_of_one_class_needs_pos_label(tmp_path):
    with refused("average_precision is the score .* classes 'ja' and 'nein'. Set pos_label"):
        fit_with_values(tmp_path, make_data())


def test_auroc_needs_no_pos_label():
    auroc = performance_of("LeaveOneOut", "auroc", None)

    check_positive_class([auroc], make_data())


def test_title_of_a_score_of_class_1_says_class():
    f1 = performance_of("LeaveOneOut", "f1", None)

    assert title_of(f1, "1") == "f1 of class 1"


@pytest.mark.slow
def test_pos_label_is_taken_as_positive(tmp_path):
    loop = fit_with_values(tmp_path, make_data(pos_label="ja"))

    (path,) = tmp_path.rglob("run.json")
    assert read_record(path)["paid_in"]["f1"]["by"] == "f1 of ja"
    assert loop.metrics["loo"].guide()["unit"] == "gain in average precision of ja"


def set_up_arrays(words, pos_label):
    numbers = np.arange(len(words), dtype=float)
    source = (numbers[:, None], np.array(words))
    return set_up_data(source, IIDPartitioner(2), pos_label=pos_label)


def set_up_table(words, pos_label):
    numbers = np.arange(len(words), dtype=float)
    source = pd.DataFrame({"number": numbers, "word": words})
    return set_up_data(source, IIDPartitioner(2), labels="word", pos_label=pos_label)


@pytest.mark.parametrize(
    ("words", "pos_label", "class_names", "positive_class"),
    [
        (["a", "b", "b"], "a", ("b", "a"), "a"),
        (["9", "10", "10"], None, ("9", "10"), "10"),
        (["false", "TRUE", "TRUE"], None, ("false", "TRUE"), "TRUE"),
        (["no", "yes", "yes"], True, ("no", "yes"), "yes"),
        (["a", "b", "c"], None, ("a", "b", "c"), None),
    ],
)
@pytest.mark.parametrize("set_up", [set_up_arrays, set_up_table])
def test_positive_class_is_the_named_one_or_the_larger_number(
    set_up, words, pos_label, class_names, positive_class
):
    words_of_samples = words * 20

    data = set_up(words_of_samples, pos_label)

    assert data.class_names == class_names
    assert data.positive_class == positive_class
    assert not data.needs_pos_label
    for client in range(2):
        words_of_client = [words_of_samples[index] for index in data.client_indices(client)]
        assert [class_names[label] for label in data.client_labels(client)] == words_of_client


@pytest.mark.parametrize("set_up", [set_up_arrays, set_up_table])
def test_positive_class_of_two_words_without_a_meaning_has_to_be_named(set_up):
    data = set_up(["a", "b", "b"] * 20, pos_label=None)

    assert data.positive_class == "b"
    assert data.needs_pos_label


BRIGHT = 200
DARK = 0


def write_images(folder, number, gray):
    folder.mkdir(parents=True)
    image = Image.new("RGB", (8, 8), (gray, gray, gray))
    for index in range(number):
        image.save(folder / f"{index}.png")


def test_pos_label_of_image_folders_is_positive(tmp_path):
    write_images(tmp_path / "train" / "ill", number=2, gray=BRIGHT)
    write_images(tmp_path / "train" / "well", number=6, gray=DARK)
    write_images(tmp_path / "test" / "ill", number=1, gray=BRIGHT)
    write_images(tmp_path / "test" / "well", number=1, gray=DARK)

    data = set_up_data(str(tmp_path), IIDPartitioner(2), pos_label="ill")

    assert data.class_names == ("well", "ill")
    for images, labels in [*data.train_dataloader(), *data.test_dataloader()]:
        is_bright = images.mean((1, 2, 3)) > 0.5
        assert torch.equal(is_bright, labels == 1)


def make_ill_and_well():
    """Numbers as labels, and beside them the classes' names."""
    dataset = TensorDataset(torch.rand(20, 2), torch.tensor([0, 1, 1, 1] * 5))
    dataset.classes = ("ill", "well")
    return dataset


def test_positive_class_of_numeric_labels_is_class_1():
    data = set_up_data(make_ill_and_well(), IIDPartitioner(2), pos_label="well")

    assert data.class_names == ("ill", "well")
    sentences = "Positive class: well, class 1. Average precision and F1 are scores of this class."
    assert describe_positive_class(data) == sentences


@pytest.mark.parametrize(
    ("source", "pos_label", "message"),
    [
        (make_ill_and_well(), "ill", "'ill' is class 0"),
        (make_ill_and_well(), "sick", "pos_label='sick': expected 'ill' or 'well'"),
        (TensorDataset(torch.rand(20, 2), torch.rand(20)), 1, "only data of two classes"),
    ],
)
def test_pos_label_that_is_not_class_1_of_two_classes_is_refused(source, pos_label, message):
    with refused(message):
        set_up_data(source, IIDPartitioner(2), pos_label=pos_label)


def test_pos_label_of_a_wrapped_data_module_is_the_positive_class(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text("label,text\n" + "ham,hello\nspam,buy\nham,hi\n" * 9)

    data = set_up_data(TextData(str(path), pos_label="ham"), OneClient())

    assert data.positive_class == "ham"
    assert not data.needs_pos_label


def identity_with_positive_class(word):
    return fit_identity({}, make_data(pos_label=word))


def test_identity_of_a_run_depends_on_its_positive_class():
    identity = identity_with_positive_class("nein")

    differences = identity_with_positive_class("ja").differences(identity)

    assert "data.class_names is ['nein', 'ja'] and was ['ja', 'nein']" in differences
