"""The federations of ``predicted.py``: which data, how they are dealt, and how they are trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Federation:
    """One federation: its data, how they are dealt, what is wrong with them, and how it is trained."""

    data: str
    n: int
    split: str  # iid, sizes, dir ALPHA, classes PER CLIENT, groups
    model: str = "mlp 32"  # soft, mlp WIDTH, cnn, lora
    rounds: int = 10
    lr: float = 0.1
    samples: int = 1000  # of all clients together
    validation: int = 300
    epochs: int = 1
    batch: int = 16
    score: str = "accuracy"  # balanced, loss, r2
    wrong: str = ""  # labels, features, duplicate, harm
    components: int = 0  # principal components in place of pixels
    cohort: int = 0  # clients drawn each round, among the coalition's members; 0: all
    classes: int = 10
    apart: bool = False  # the truth is of other samples than the validation set's


TUNING = {
    "digits_dir_5": Federation("digits", 5, "dir 0.5", rounds=15),
    "digits_sizes_6": Federation("digits", 6, "sizes", rounds=12),
    "digits_labels_6": Federation(
        "digits",
        6,
        "iid",
        rounds=12,
        wrong="labels",
    ),
    "digits_two_5": Federation("digits", 5, "classes 2", rounds=15),
    "mnist_dir_6": Federation("mnist", 6, "dir 0.3", rounds=8),
    "mnist_twins_6": Federation(
        "mnist",
        6,
        "dir 0.5",
        rounds=8,
        wrong="duplicate",
    ),
    "fashion_dir_7": Federation("fashion", 7, "dir 0.3", rounds=6),
    "fashion_features_6": Federation(
        "fashion",
        6,
        "iid",
        "soft",
        rounds=8,
        wrong="features",
    ),
    "wine_dir_4": Federation(
        "wine",
        4,
        "dir 1",
        rounds=15,
        epochs=2,
        samples=100,
        validation=39,
    ),
    "breast_labels_5": Federation(
        "breast_cancer", 5, "sizes", rounds=12, samples=300, validation=130, wrong="labels"
    ),
    "blobs_dir_6": Federation(
        "blobs",
        6,
        "dir 0.5",
        rounds=12,
        samples=1200,
    ),
    "blobs_labels_7": Federation(
        "blobs",
        7,
        "iid",
        rounds=8,
        samples=1200,
        wrong="labels",
    ),
    "mnist_cnn_5": Federation(
        "mnist",
        5,
        "dir 0.3",
        "cnn",
        rounds=18,
        samples=700,
    ),
    "digits_harm_5": Federation(
        "digits",
        5,
        "dir 0.5",
        rounds=10,
        epochs=2,
        lr=0.05,
        wrong="harm",
    ),
    "women_5": Federation(
        "contraception", 5, "groups", "mlp 16", 15, samples=1200, score="balanced"
    ),
    "mnist_dir_10": Federation(
        "mnist",
        10,
        "dir 0.5",
        "mlp 16",
        8,
        components=30,
    ),
    "digits_labels_10": Federation(
        "digits",
        10,
        "dir 1",
        "soft",
        12,
        wrong="labels",
    ),
}
#: Written down, and committed, before any of them was trained.
HELD_OUT = {
    "digits_16": Federation(
        "digits",
        16,
        "dir 1",
        "soft",
        12,
        0.3,
        batch=32,
        components=20,
    ),
    "fashion_labels_14": Federation(
        "fashion", 14, "dir 0.5", "mlp 12", 10, 0.3, components=20, wrong="labels"
    ),
    "lesions_12": Federation(
        "ham10000_28",
        12,
        "dir 0.5",
        "mlp 12",
        12,
        0.3,
        samples=1400,
        score="balanced",
        components=24,
    ),
    "lungs_11": Federation(
        "pneumoniamnist", 11, "sizes", "mlp 12", 10, score="balanced", components=20, wrong="labels"
    ),
    "mnist_disjoint_10": Federation(
        "mnist",
        10,
        "classes 1",
        "mlp 16",
        12,
        0.3,
        components=30,
    ),
    "cifar_cnn_4": Federation(
        "cifar",
        4,
        "dir 0.5",
        "cnn",
        25,
        samples=800,
        classes=4,
    ),
    "fashion_cnn_4": Federation(
        "fashion",
        4,
        "dir 0.3",
        "cnn",
        18,
        samples=800,
    ),
    "pupils_6": Federation(
        "exam",
        6,
        "groups",
        "mlp 16",
        12,
        0.05,
        samples=1200,
        score="r2",
    ),
    "diabetes_5": Federation(
        "diabetes", 5, "sizes", "mlp 16", 15, 0.02, samples=280, validation=80, score="r2"
    ),
    "topics_lora_4": Federation(
        "reuters", 4, "groups", "lora", 8, 1.5, samples=480, validation=100, score="loss"
    ),
    "mnist_three_of_6": Federation(
        "mnist",
        6,
        "dir 0.5",
        rounds=40,
        lr=0.05,
        cohort=3,
    ),
    "digits_two_of_7": Federation(
        "digits",
        7,
        "dir 1",
        rounds=60,
        lr=0.05,
        cohort=2,
    ),
    "fashion_labels_6": Federation(
        "fashion",
        6,
        "dir 1",
        rounds=10,
        wrong="labels",
    ),
    "digits_disjoint_5": Federation("digits", 5, "classes 2", "mlp 24", 20),
    "fashion_twins_6": Federation(
        "fashion",
        6,
        "dir 0.5",
        rounds=10,
        wrong="duplicate",
    ),
    "mnist_harm_6": Federation(
        "mnist",
        6,
        "dir 1",
        rounds=10,
        wrong="harm",
    ),
    "mnist_hundred_7": Federation(
        "mnist",
        7,
        "dir 0.3",
        rounds=10,
        validation=100,
        apart=True,
    ),
}

ALL = TUNING | HELD_OUT
