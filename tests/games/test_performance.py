"""Performances by which coalitions are evaluated: torchmetrics, by configuration, by retraining, and refusals."""

import copy
import itertools
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from games.all_coalitions import partition_in_three, play_all_coalitions
from sklearn import metrics as sk
from torch import nn

from flsv import Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.functional import few_coalitions
from flsv.games import ModelEvaluator
from flsv.metrics import GradientShapley, LeaveOneOut, PartialFederatedShapley, ShadowShapley
from flsv.scores import FromOutputs, performance_of
from flsv.scores.class_scores import ClassScore
from helpers import make_generator, refused
from helpers.fits import all_samples, fit, make_untrainable
from zoo.tasks import Glue, Multilabel, OneLogit, Regression, Segmentation, SeveralLoaders

MEAN_SQUARED_ERROR = torchmetrics.MeanSquaredError()
JACCARD_INDEX = torchmetrics.JaccardIndex(task="multiclass", num_classes=2)
MULTILABEL_AUROC = torchmetrics.AUROC(task="multilabel", num_labels=3)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("task", "metric", "utility"),
    [
        pytest.param(
            SeveralLoaders,
            MEAN_SQUARED_ERROR,
            lambda outputs, y: -(outputs[:, 0] - y).square().mean(),
            id="error",
        ),
        pytest.param(Segmentation, JACCARD_INDEX, copy.deepcopy(JACCARD_INDEX), id="masks"),
        pytest.param(
            Multilabel,
            MULTILABEL_AUROC,
            lambda outputs, y: copy.deepcopy(MULTILABEL_AUROC)(outputs.sigmoid(), y),
            id="labels",
        ),
    ],
)
def test_torchmetrics_performance_equals_the_metric_of_all_outputs(task, metric, utility, tmp_path):
    module = task()
    values, vectors = play_all_coalitions(
        tmp_path, module, partition_in_three(task.data()), performance=metric
    )

    x, y = all_samples(validation_batches(task))
    net = copy.deepcopy(module).eval()
    expected = []
    for vector in vectors:
        ParameterSpace(net).write(net, vector)
        with torch.no_grad():
            outputs = net(x)
        expected.append(float(utility(outputs, y)))

    assert len(set(expected)) > 1
    assert values.tolist() == pytest.approx(expected, rel=1e-5)
    # Copies of the user's metric have computed the values.
    assert not metric.update_called


def validation_batches(task):
    """The batches of a task's only validation loader, or of several one after the other."""
    loaders = task.data().val_dataloader()
    if not isinstance(loaders, list):
        return list(loaders)
    return list(itertools.chain.from_iterable(loaders))


def fit_untrainable(kind, metric, folder, **loop_options):
    """Begin a fit whose first batch would be an error."""
    loop = FederatedLoop(metrics={"mine": metric}, seed=3, **loop_options)
    fit(loop, folder, make_untrainable(kind), partition_in_three(kind.data()))


class GlueWhoseForwardFails(Glue):
    def forward(self, batch):
        raise AssertionError("batches that are no pairs are not given to forward")


ACCURACY = torchmetrics.Accuracy("multiclass", num_classes=2, average="micro")


class ModuleWithoutValidationStep(Regression):
    validation_step = L.LightningModule.validation_step


@pytest.mark.parametrize(
    ("kind", "measure", "message"),
    [
        (
            Regression,
            {"performance": "acc", "mode": "max"},
            r"Regression logs no 'acc' .* It logs \['v",
        ),
        (
            ModuleWithoutValidationStep,
            {"performance": "val_loss", "mode": "min"},
            "validation_step, which is not defined",
        ),
        (
            GlueWhoseForwardFails,
            {"performance": torchmetrics.F1Score(task="binary")},
            "but a batch is dict",
        ),
        (
            Segmentation,
            {"performance": torchmetrics.Accuracy("multiclass", num_classes=2, average="none")},
            r"returns a tensor \[2\], but .* one number .*average=\"macro\"",
        ),
        (
            Segmentation,
            {"performance": torchmetrics.MinMaxMetric(ACCURACY), "mode": "max"},
            "MinMaxMetric returns dict, .* the metric that this one wraps",
        ),
    ],
)
def test_performance_that_does_not_fit_the_module_is_refused_before_training(
    tmp_path, kind, measure, message
):
    with refused(message):
        fit_untrainable(kind, PartialFederatedShapley(**measure), tmp_path)


class LogsCorrelationOfZeros(Regression):
    """Its outputs are equal before training, and it logs their correlation with the labels."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        columns = torch.stack([self(x).flatten(), y.flatten()])
        self.log("val_correlation", torch.corrcoef(columns)[0, 1])


class ReturnsInfiniteLogits(OneLogit):
    """A class that cannot be has the logit -inf, as masked actions have."""

    def forward(self, x):
        logits = self.net(x)
        return torch.cat([-logits, logits, torch.full_like(logits, -torch.inf)], 1)


class ReturnsProbabilities(OneLogit):
    def forward(self, x):
        share = self.net(x).sigmoid()
        return torch.cat([1 - share, share], 1)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "make_metric_by_loss",
    [
        partial(LeaveOneOut, performance="negative_loss"),
        partial(ShadowShapley, performance="negative_loss"),
        GradientShapley,
    ],
)
def test_loss_of_probabilities_is_refused_before_training(tmp_path, make_metric_by_loss):
    """A cross-entropy that takes probabilities for logits hardly tells good models from bad ones."""
    with refused("'mine'.*forward gives probabilities"):
        fit_untrainable(ReturnsProbabilities, make_metric_by_loss(), tmp_path)


BY_LOGGED_CORRELATION = {"performance": "val_correlation", "mode": "max"}
BY_CORRELATION_OF_OUTPUTS = {"performance": torchmetrics.PearsonCorrCoef(), "mode": "max"}


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "metric_class", "measure", "message"),
    [
        (LogsCorrelationOfZeros, LeaveOneOut, BY_LOGGED_CORRELATION, "log a finite number"),
        (LogsCorrelationOfZeros, ShadowShapley, BY_CORRELATION_OF_OUTPUTS, "between 0 and 0"),
        (
            ReturnsInfiniteLogits,
            ShadowShapley,
            {"performance": torchmetrics.Accuracy("multiclass", num_classes=3)},
            "11 of 33 outputs are not finite",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_performance_undefined_for_the_untrained_model_is_refused_before_training(
    tmp_path, kind, metric_class, measure, message
):
    """This is refused even if the run writes and prints nothing. Its values would be NaN."""
    silent = Reporting(table=False, files=False)
    with refused(f"'mine'.* untrained model.*{message}"):
        fit_untrainable(kind, metric_class(**measure), tmp_path, reporting=silent)


NETWORKS = {
    "two logits": lambda: nn.Linear(3, 2),
    "one logit": lambda: nn.Linear(3, 1),
    "three logits": lambda: nn.Linear(3, 3),
    "probabilities": lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
}
TORCHMETRICS_OF_SCORES = {
    "auroc": torchmetrics.AUROC(task="binary"),
    "average_precision": torchmetrics.AveragePrecision(task="binary"),
    "f1": torchmetrics.F1Score(task="binary"),
}


def make_batches(num_classes):
    """Two of three labels follow from the first feature, the third one does not."""
    x = torch.randn(60, 3, generator=make_generator())
    samples = torch.arange(60)
    follows_feature = samples % 3 > 0
    class_by_feature = x[:, 0] > 0
    class_in_turn = samples // 3 % num_classes
    y = torch.where(follows_feature, class_by_feature, class_in_turn)
    return list(zip(x.split(16), y.split(16)))


def make_evaluator(net, performance, data):
    measure = performance_of("mine", performance, mode=None)
    return ModelEvaluator(net, ParameterSpace(net), data, metric=measure.of, logits=measure.logits)


#: By scikit-learn: of the probabilities of class 1 ``[V]``, or of three classes ``[V, 3]``.
SCORES_OF_TWO_CLASSES = {
    "auroc": sk.roc_auc_score,
    "average_precision": sk.average_precision_score,
    "f1": lambda y, probabilities: sk.f1_score(y, probabilities > 0.5),
}
SCORES_OF_THREE_CLASSES = {
    "auroc": lambda y, probabilities: sk.roc_auc_score(np.eye(3)[y], probabilities),
    "average_precision": lambda y, probabilities: sk.average_precision_score(
        np.eye(3)[y], probabilities
    ),
    "f1": lambda y, probabilities: sk.f1_score(y, probabilities.argmax(1), average="macro"),
}
#: Class probabilities by outputs of a network ``[V, M]``.
PROBABILITIES = {
    "two logits": lambda logits: logits.softmax(1),
    "one logit": lambda logits: torch.cat([(-logits).sigmoid(), logits.sigmoid()], 1),
    "three logits": lambda logits: logits.softmax(1),
    "probabilities": lambda probabilities: probabilities,
}


def make_models(net):
    size = ParameterSpace(net).size
    return torch.randn(5, size, generator=make_generator(1))


def probabilities_by_hand(kind, models, x):
    """Class probabilities of all models ``[K, V, M]``."""
    net = NETWORKS[kind]()
    probabilities = []
    for model in models:
        ParameterSpace(net).write(net, model)
        with torch.no_grad():
            probabilities.append(PROBABILITIES[kind](net(x).double()))
    return torch.stack(probabilities)


def assert_scores(evaluator, performance, models, probabilities, expected):
    """The scores of models are these, and so are the scores of outputs, which are kept as logits."""
    scores = evaluator(models, keep=True)
    output_measure = evaluator.output_measure(performance_of("mine", performance, mode=None))
    scores_of_outputs = output_measure.utility(scores.outputs)

    torch.testing.assert_close(scores.outputs.double().softmax(-1), probabilities)
    assert scores.value("metric").tolist() == pytest.approx(expected, abs=1e-6)
    assert scores_of_outputs.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.by_turn
@pytest.mark.fast_rows("auroc-two logits", "*three logits")
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", TORCHMETRICS_OF_SCORES)
def test_auroc_average_precision_and_f1_equal_scikit_learns(name, kind):
    net = NETWORKS[kind]()
    models = make_models(net)
    num_classes = 3 if kind == "three logits" else 2
    data = make_batches(num_classes)
    x, y = all_samples(data)
    probabilities = probabilities_by_hand(kind, models, x)
    if num_classes == 2:
        expected = scores_by_sklearn(SCORES_OF_TWO_CLASSES[name], y, probabilities[:, :, 1])
        metric = TORCHMETRICS_OF_SCORES[name]
        by_torchmetrics = make_evaluator(net, metric, data)
        assert_scores(by_torchmetrics, metric, models, probabilities, expected)
    else:
        expected = scores_by_sklearn(SCORES_OF_THREE_CLASSES[name], y, probabilities)

    assert len(set(expected)) > 1
    assert_scores(make_evaluator(net, name, data), name, models, probabilities, expected)


def scores_by_sklearn(score, labels, probabilities):
    return [score(labels.numpy(), of_model) for of_model in probabilities.numpy()]


@pytest.mark.fast_rows("two logits-auroc-labels2-all of class 1")
@pytest.mark.parametrize(
    ("kind", "measure", "labels", "message"),
    [
        ("two logits", "f1", torch.rand(8), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8, 3).long(), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8).long(), "all of class 1"),
        (
            "three logits",
            TORCHMETRICS_OF_SCORES["auroc"],
            torch.arange(8) % 2,
            r"BinaryAUROC raised an error .*\w\. Pass a metric",
        ),
    ],
)
def test_outputs_or_labels_for_which_a_score_is_undefined_are_refused(
    kind, measure, labels, message
):
    with refused(message):
        make_evaluator(NETWORKS[kind](), measure, [(torch.rand(8, 3), labels)])


@pytest.mark.parametrize("are_logits", [True, False])
def test_outputs_between_0_and_1_are_logits_or_probabilities_as_the_performance_says(are_logits):
    """torchmetrics would take a batch whose logits all lie in [0, 1] for probabilities."""
    logits_layer = nn.Linear(3, 1)
    nn.init.constant_(logits_layer.bias, 0.3)
    logits_layer.weight.data *= 0.05
    net = logits_layer if are_logits else nn.Sequential(logits_layer, nn.Sigmoid())
    data = make_batches(num_classes=2)
    x, y = all_samples(data)
    logits = logits_layer(x)
    assert logits.min() > 0
    assert logits.max() < 1

    accuracy = torchmetrics.Accuracy(task="binary")
    with refused("logits or probabilities"):
        make_evaluator(net, accuracy, data)
    evaluator = make_evaluator(net, FromOutputs(accuracy, logits=are_logits), data)

    # All logits are positive, so the model predicts class 1 for each sample.
    share_of_class_1 = float(y.float().mean())
    assert value_of(evaluator, net) == pytest.approx(share_of_class_1)


def value_of(evaluator, net):
    model = ParameterSpace(net).read(net)
    return float(evaluator(model[None]).value("metric"))


def test_last_dimension_of_1_that_only_the_labels_have_is_dropped():
    net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    x = torch.rand(8, 3)
    targets = torch.rand(8)
    evaluator = make_evaluator(net, MEAN_SQUARED_ERROR, [(x, targets[:, None])])

    error = (net(x) - targets).square().mean()
    assert value_of(evaluator, net) == pytest.approx(float(error))


@pytest.mark.parametrize("num_classes", [3, 7])
def test_f1_is_the_mean_over_classes_that_have_samples(num_classes):
    classes_with_samples = [0, 1]
    labels = torch.randint(0, 2, (50,))
    probabilities = torch.rand(50, num_classes)
    predictions = probabilities.argmax(1)

    score = ClassScore("f1")
    score.update(probabilities, labels)

    expected = sk.f1_score(
        labels, predictions, average="macro", labels=classes_with_samples, zero_division=0
    )
    assert float(score.compute()) == pytest.approx(expected)


class ReturnsClassNumbers(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        return logits.argmax(1)


@pytest.mark.slow
def test_class_numbers_are_scored_but_those_of_coalitions_are_not_predicted():
    """A prediction halfway between class 0 and class 2 would be class 1."""
    module = ReturnsClassNumbers(2, 3)
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
    inputs = torch.eye(2)
    predicted_classes = module(inputs)
    evaluator = make_evaluator(module, accuracy, [(inputs, predicted_classes)])

    # Without a form, outputs are not predicted.
    assert evaluator.form is None
    assert value_of(evaluator, module) == 1


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


class Cosine(nn.Linear):
    def forward(self, x):
        cosines = nn.functional.cosine_similarity(x, self.weight)
        return cosines[:, None]


#: Last layers whose outputs are above 0.
POSITIVE_LAYERS = [Exp, nn.Softplus, nn.Sigmoid]


def make_network_ending_with(layer):
    return nn.Sequential(nn.Linear(3, 1), layer())


def form_of_outputs(net):
    """Return what an evaluator by errors has found of the network's outputs."""
    inputs = torch.rand(8, 3)
    targets = inputs.sum(1)
    return make_evaluator(net, MEAN_SQUARED_ERROR, [(inputs, targets)]).form


@pytest.mark.parametrize("layer", [*POSITIVE_LAYERS, nn.Tanh])
def test_bounded_outputs_are_recognized_before_training(layer):
    assert form_of_outputs(make_network_ending_with(layer)).is_bounded


def test_cosines_are_recognized_as_bounded_outputs():
    assert form_of_outputs(Cosine(3, 1)).is_bounded


@pytest.mark.parametrize("layer", [nn.Identity, nn.LeakyReLU])
def test_unbounded_outputs_are_recognized_before_training(layer):
    assert not form_of_outputs(make_network_ending_with(layer)).is_bounded


class RoundsOutputs(nn.Module):
    def forward(self, x):
        return x.round()


def test_whole_numbers_are_scored_but_those_of_coalitions_are_not_predicted():
    """Between the counts 2 and 3 lies no count."""
    form = form_of_outputs(make_network_ending_with(RoundsOutputs))

    # Without a form, outputs are not predicted.
    assert form is None


@pytest.mark.fast_rows
@pytest.mark.parametrize("layer", POSITIVE_LAYERS)
def test_predicted_outputs_of_a_positive_layer_are_positive(layer):
    net = make_network_ending_with(layer)
    inputs = torch.rand(8, 3)
    targets = inputs.sum(1)
    deviance = torchmetrics.TweedieDevianceScore(power=1.0)
    measure = performance_of("mine", deviance, mode="min")
    evaluator = make_evaluator(net, measure, [(inputs, targets)])

    masks = few_coalitions(3, "singles")
    num_parameters = ParameterSpace(net).size
    # Models so far apart have outputs whose linear prediction would be below 0.
    far_apart_models = 3 * torch.randn(len(masks), num_parameters)
    scores = evaluator(far_apart_models, keep=True)
    utilities = -scores.value("metric")
    output_measure = evaluator.output_measure(measure)

    # The deviance of a prediction below 0 would raise an error here.
    estimates = output_measure.shapley(masks, [utilities], [scores.outputs], weights=torch.ones(3))

    (estimate,) = estimates
    is_grand = masks.all(dim=1)
    is_empty = ~masks.any(dim=1)
    gain = float(utilities[is_grand] - utilities[is_empty])
    assert float(estimate.values.sum()) == pytest.approx(gain, rel=1e-4)
