"""Seven federations made after drawn cohorts, designs for many clients and brackets were chosen, and looked at once
(see `fresh_payments.py`): two with samplers, three of 13 to 20 clients, two in which all of a few clients take part.
"""

from __future__ import annotations

from typing import Any

from fresh_federations import Fresh, Pooled, classifier, dealt, images, made, own, spoilt

from flsv.sampling import BernoulliSampler, UniformSampler

assert Pooled  # named in configurations below

WOMEN: dict[str, Any] = {
    "source": {
        "class_path": "flsv.data.TableData",
        "init_args": {
            "path": "tables/contraception.csv",
            "target": "use",
            "val_fraction": 0.4,
            "columns": {"exclude": ["woman", "district"], "categorical": ["livch"]},
        },
    },
    "splits": {"max_samples": 900, "seed": 17},
    "partitioner": dealt("Size", 6, 171, proportions=[1, 2, 2, 3, 4, 4]),
    "corruptions": [spoilt("ClosedSetLabelNoise", [3], rate=0.5)],
    "batch_size": 16,
}


def catalogue() -> dict[str, Fresh]:
    pooled = own("fresh_federations.Pooled")
    found = [
        Fresh(
            made(
                "three_of_6",
                "digits, three of six clients a round, wrong labels",
                16,
                images(
                    "digits",
                    6,
                    90,
                    dealt("Dirichlet", 6, 172, alpha=0.6),
                    [spoilt("ClosedSetLabelNoise", [1], rate=0.5)],
                ),
                classifier("mlp", "SGD", 0.05, momentum=0.9),
            ),
            lambda: {"sampler": UniformSampler(3)},
        ),
        Fresh(
            made(
                "coins_8",
                "Fashion-MNIST, about three of eight clients a round, 1 to 4 parts, noise",
                14,
                images(
                    "fashion_mnist",
                    8,
                    90,
                    dealt("Size", 8, 173, proportions=[1, 1, 2, 2, 3, 3, 4, 4]),
                    [spoilt("GaussianNoise", [5], std=1.5)],
                ),
                classifier(pooled, "SGD", 0.1),
            ),
            lambda: {"sampler": BernoulliSampler(3)},
        ),
        Fresh(
            made(
                "momentum_13",
                "digits, SGD with momentum, noise",
                10,
                images(
                    "digits",
                    13,
                    70,
                    dealt("Dirichlet", 13, 174, alpha=0.5),
                    [spoilt("GaussianNoise", [2, 7], std=1.5)],
                ),
                classifier("mlp", "SGD", 0.03, momentum=0.9),
                circles=3,
            )
        ),
        Fresh(
            made(
                "fashion_16",
                "Fashion-MNIST, 1 to 4 parts, wrong labels",
                8,
                images(
                    "fashion_mnist",
                    16,
                    64,
                    dealt("Size", 16, 175, proportions=[1, 2, 3, 4] * 4),
                    [spoilt("ClosedSetLabelNoise", [4, 10, 15], rate=0.6)],
                ),
                classifier(pooled, "SGD", 0.1),
                circles=3,
            )
        ),
        Fresh(
            made(
                "labels_20",
                "digits, Adam, few classes a client",
                8,
                images("digits", 20, 60, dealt("Dirichlet", 20, 176, alpha=0.4)),
                classifier("mlp", "Adam", 0.01),
                circles=2,
            )
        ),
        Fresh(
            made(
                "women_6",
                "contraception in Bangladesh, accuracy, wrong labels",
                12,
                WOMEN,
                classifier("mlp", "SGD", 0.05, momentum=0.9),
                needs=["tables/contraception.csv"],
            )
        ),
        Fresh(
            made(
                "mnist_5",
                "MNIST, few classes a client, noise",
                10,
                images("mnist", 5, 100, dealt("Dirichlet", 5, 177, alpha=0.3), [spoilt("GaussianNoise", [0], std=1.5)]),
                classifier(pooled, "SGD", 0.1),
            )
        ),
    ]
    return {each.federation.name: each for each in found}
