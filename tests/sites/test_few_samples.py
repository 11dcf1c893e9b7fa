"""A site tells no score of few samples, in total or of a class."""

import math
from functools import partial

import pytest

from flsv.metrics import ContributionEstimation
from helpers.curious_server import (
    EVALUATED,
    EVALUATED_BY_CLIENTS,
    LABELS_WITH_A_RARE_CLASS,
    NUM_SAMPLES,
    REPEATED_ATTEMPTS,
    CuriousServer,
    OneWeightPerSample,
    make_data,
    make_rare_data,
    model_that_picks,
    score_models,
    score_of_others,
)


@pytest.mark.fast_rows
@pytest.mark.parametrize("name", ["tests", "scores of the others", "scores of models"])
def test_site_tells_no_score_of_fewer_than_five_samples(tmp_path, name):
    options, send_request = REPEATED_ATTEMPTS[name]
    four_samples = 4 / NUM_SAMPLES
    server = CuriousServer(tmp_path, data=partial(make_data, held_out=four_samples), **options)
    assert send_request(server, 3) is None


def test_site_tells_no_score_of_the_others_by_classes_if_one_is_rare(tmp_path):
    metric = ContributionEstimation(performance="balanced_accuracy")
    server = CuriousServer(tmp_path, data=make_rare_data, metrics={"fedce": metric})
    assert score_of_others(server, 3, "balanced_accuracy") is None


class FloatLabels(OneWeightPerSample):
    """Its labels are numbers with a point, which may be values to predict, so that the site knows no classes."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return super().training_step((inputs, labels.long()), batch_idx)


class FloatLabelsServer(CuriousServer):
    make_module = FloatLabels


@pytest.mark.parametrize(
    ("server_class", "data"),
    [
        (CuriousServer, make_rare_data),
        (FloatLabelsServer, partial(make_data, LABELS_WITH_A_RARE_CLASS.float())),
    ],
    ids=["a rare class", "unknown classes"],
)
def test_site_that_cannot_tell_scores_of_classes_tells_the_accuracy_alone(
    tmp_path, server_class, data
):
    server = server_class(tmp_path, data=data, **EVALUATED)
    reply = server.send("test", model=model_that_picks(3))

    assert reply.plain["withheld"] == ["balanced_accuracy", "auroc"]
    assert 0 <= reply.plain["accuracy"] <= 1
    assert math.isnan(reply.plain["auroc"])


def test_size_of_a_rare_class_is_not_the_difference_of_reported_sizes(tmp_path):
    server = CuriousServer(tmp_path, data=make_rare_data, **EVALUATED_BY_CLIENTS)
    class_sizes, _ = score_models(server, [None])

    assert server.greeting.plain["sizes"]["val"] == 10
    # Otherwise the rare class's size would be the difference to the sum.
    assert class_sizes.tolist() == [0, 0, 0]
