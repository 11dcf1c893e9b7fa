"""Performances by which coalitions are evaluated: torchmetrics, by configuration, by retraining, and refusals."""

import copy
import itertools

import lightning as L
import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics
from games.all_coalitions import partition_in_three, play_all_coalitions
from torch import Tensor, nn

from flsv import Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.functional import few_coalitions
from flsv.games import ModelEvaluator
from flsv.games.output_score import OutputScore
from flsv.metrics import GradientShapley, LeaveOneOut, PartialFederatedShapley, ShadowShapley
from flsv.scores import FromOutputs, performance_of
from flsv.scores.class_scores import ClassScore
from helpers import make_generator, refused
from helpers.fits import fit, make_untrainable
from zoo.tasks import (
    Glue,
    Multilabel,
    OneLogit,
    Regression,
    Segmentation,
    SeveralLoaders,
    Task,
)

METRICS = [
    (SeveralLoaders, torchmetrics.MeanSquaredError(), -1),
    (Segmentation, torchmetrics.JaccardIndex(task="multiclass", num_classes=2), 1),
    (Multilabel, torchmetrics.AUROC(task="multilabel", num_labels=3), 1),
]


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "metric", "sign"),
    METRICS,
    ids=[kind.__name__ for kind, _, _ in METRICS],
)
def test_torchmetrics_performance_equals_the_metric_alone(tmp_path, kind, metric, sign):
    torch.manual_seed(1)
    module = kind()
    values, vectors = play_all_coalitions(
        tmp_path, module, partition_in_three(kind.data()), performance=metric
    )
    expected = []
    for vector in vectors:
        net = copy.deepcopy(module).eval()
        ParameterSpace(net).write(net, vector)
        loaders = kind.data().val_dataloader()
        batches = list(itertools.chain(*loaders) if isinstance(loaders, list) else loaders)
        with torch.no_grad():
            preds = torch.cat([net(x) for x, _ in batches])
        y = torch.cat([y for _, y in batches])
        if kind is Multilabel:
            preds = preds.sigmoid()
        if preds.shape[1:] == (1,):
            preds = preds.squeeze(-1)
        value = copy.deepcopy(metric)(preds, y)
        expected.append(sign * float(value))

    assert len(set(expected)) > 1
    assert values.tolist() == pytest.approx(expected, rel=1e-5)
    assert not metric.update_called


class GlueWithForward(Glue):
    def forward(self, batch):
        raise AssertionError("batches that are no pairs are not given to forward")


ACCURACY = torchmetrics.Accuracy("multiclass", num_classes=2, average="micro")


class NoValidation(Task):
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
            NoValidation,
            {"performance": "val_loss", "mode": "min"},
            "validation_step, which is not defined",
        ),
        (
            GlueWithForward,
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
    metric = PartialFederatedShapley(**measure)
    loop = FederatedLoop(metrics={"mine": metric}, seed=3)
    data = partition_in_three(getattr(kind, "data", Regression.data)())
    with refused(message):
        fit(loop, tmp_path, make_untrainable(kind), data)


class BeginsWithZeros(Regression):
    """Its outputs are equal before training, and it logs their correlation with the labels."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        columns = torch.stack([self(x).flatten(), y.flatten()])
        self.log("val_correlation", torch.corrcoef(columns)[0, 1])


class RulesClassesOut(OneLogit):
    """A class that cannot be has the logit -inf, as masked actions have."""

    def forward(self, x):
        logits = self.net(x)
        return torch.cat([-logits, logits, torch.full_like(logits, -torch.inf)], 1)


class GivesProbabilities(OneLogit):
    def forward(self, x):
        share = self.net(x).sigmoid()
        return torch.cat([1 - share, share], 1)


@pytest.mark.fast_rows
@pytest.mark.parametrize("metric", [LeaveOneOut, ShadowShapley, GradientShapley])
def test_loss_of_probabilities_is_refused_before_training(tmp_path, metric):
    """As of logits, its largest values would differ by little."""
    options = {} if metric is GradientShapley else {"performance": "negative_loss"}
    loss_metric = metric(**options)
    loop = FederatedLoop(metrics={"mine": loss_metric}, seed=3)
    data = partition_in_three(OneLogit.data())

    with refused("'mine'.*forward gives probabilities"):
        fit(loop, tmp_path, make_untrainable(GivesProbabilities), data)


LOGGED = {"performance": "val_correlation", "mode": "max"}
OF_OUTPUTS = {"performance": torchmetrics.PearsonCorrCoef(), "mode": "max"}


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "metric", "measure", "message"),
    [
        (BeginsWithZeros, LeaveOneOut, LOGGED, "log a finite number"),
        (BeginsWithZeros, ShadowShapley, OF_OUTPUTS, "between 0 and 0"),
        (
            RulesClassesOut,
            ShadowShapley,
            {"performance": torchmetrics.Accuracy("multiclass", num_classes=3)},
            "11 of 33 outputs are not finite",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_what_is_undefined_for_the_untrained_model_is_refused_before_training(
    tmp_path, kind, metric, measure, message
):
    """Otherwise all training ends in values that are NaN, even where nothing is written or printed."""
    loop = FederatedLoop(
        metrics={"mine": metric(**measure)},
        seed=3,
        reporting=Reporting(table=False, files=False),
    )
    data = partition_in_three(kind.data())

    with refused(f"'mine'.* untrained model.*{message}"):
        fit(loop, tmp_path, make_untrainable(kind), data)


KINDS = {
    "two logits": lambda: nn.Linear(3, 2),
    "one logit": lambda: nn.Linear(3, 1),
    "three logits": lambda: nn.Linear(3, 3),
    "probabilities": lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
}
SCORES = {
    "auroc": torchmetrics.AUROC(task="binary"),
    "average_precision": torchmetrics.AveragePrecision(task="binary"),
    "f1": torchmetrics.F1Score(task="binary"),
}


def make_batches(classes: int) -> list[tuple[Tensor, Tensor]]:
    """Labels that no line tells apart."""
    x = torch.randn(60, 3, generator=make_generator())
    y = torch.where(torch.arange(60) % 3 > 0, x[:, 0] > 0, torch.arange(60) // 3 % classes)
    return list(zip(x.split(16), y.split(16)))


def make_evaluator(net: nn.Module, measure, data: list[tuple[Tensor, Tensor]]) -> ModelEvaluator:
    score = performance_of("mine", measure, None)
    return ModelEvaluator(net, ParameterSpace(net), data, metric=score.of, logits=score.logits)


def by_scikit_learn(name: str, probabilities: np.ndarray, y: np.ndarray) -> float:
    function = {
        "auroc": sklearn.metrics.roc_auc_score,
        "average_precision": sklearn.metrics.average_precision_score,
    }
    if name == "f1":
        average = "binary" if probabilities.shape[1] == 2 else "macro"
        return float(sklearn.metrics.f1_score(y, probabilities.argmax(1), average=average))

    if probabilities.shape[1] == 2:
        return float(function[name](y, probabilities[:, 1]))
    by_class = []
    for label in np.unique(y):
        by_class.append(function[name](y == label, probabilities[:, label]))
    return float(np.mean(by_class))


@pytest.mark.fast_rows("average_precision-three logits")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
def test_auroc_average_precision_and_f1_of_models_equal_scikit_learns(kind, name):
    net = KINDS[kind]()
    data = make_batches(3 if kind == "three logits" else 2)
    space = ParameterSpace(net)
    vectors = torch.randn(5, space.size, generator=make_generator(1))
    x, y = (torch.cat(parts) for parts in zip(*data))
    probabilities = []
    expected = []
    for vector in vectors:
        model = copy.deepcopy(net)
        space.write(model, vector)
        with torch.no_grad():
            outputs = model(x).double()
        if kind == "one logit":
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
        if kind != "probabilities":
            outputs = outputs.softmax(1)
        probabilities.append(outputs)
        expected.append(by_scikit_learn(name, outputs.numpy(), y.numpy()))

    assert len(set(expected)) > 1

    measures = [name]
    if kind != "three logits":
        measures.append(SCORES[name])

    for measure in measures:
        evaluator = make_evaluator(net, measure, data)
        scores = evaluator(vectors, keep=True)
        assert scores.outputs is not None
        scores_of_outputs = evaluator.output_scorer().score(scores.outputs)

        # What is kept are logits, whatever forward returns.
        kept_probabilities = scores.outputs.double().softmax(-1)
        torch.testing.assert_close(kept_probabilities, torch.stack(probabilities))
        for values in (scores.value("metric"), scores_of_outputs.value("metric")):
            assert values.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.fast_rows("two logits-auroc-labels2-all of class 1")
@pytest.mark.parametrize(
    ("kind", "measure", "labels", "message"),
    [
        ("two logits", "f1", torch.rand(8), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8, 3).long(), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8).long(), "all of class 1"),
        (
            "three logits",
            SCORES["auroc"],
            torch.arange(8) % 2,
            r"BinaryAUROC raised an error .*\w\. Pass a metric",
        ),
    ],
)
def test_outputs_or_labels_for_which_a_score_is_undefined_are_refused(
    kind, measure, labels, message
):
    with refused(message):
        make_evaluator(KINDS[kind](), measure, [(torch.rand(8, 3), labels)])


@pytest.mark.parametrize("are_logits", [True, False])
def test_outputs_in_0_to_1_are_what_the_metric_says(are_logits):
    """torchmetrics would take a batch whose logits all lie in [0, 1] for probabilities."""
    linear = nn.Linear(3, 1)
    nn.init.constant_(linear.bias, 0.3)
    linear.weight.data *= 0.05
    net = linear if are_logits else nn.Sequential(linear, nn.Sigmoid())
    data = make_batches(2)
    accuracy = torchmetrics.Accuracy(task="binary")

    with refused("logits or probabilities"):
        make_evaluator(net, accuracy, data)
    evaluator = make_evaluator(net, FromOutputs(accuracy, logits=are_logits), data)

    x, y = (torch.cat(parts) for parts in zip(*data))
    assert ((linear(x) > 0) & (linear(x) < 1)).all()
    vector = ParameterSpace(net).read(net)
    value = float(evaluator(vector[None]).value("metric"))
    assert value == pytest.approx(float(y.float().mean()))  # all logits are positive


def test_a_last_dimension_of_1_that_only_the_labels_have_is_dropped():
    net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    x, y = torch.rand(2, 8, 3).unbind()
    vectors = ParameterSpace(net).read(net)[None]
    evaluate = make_evaluator(
        net,
        torchmetrics.MeanSquaredError(),
        [(x, y[:, :1])],
    )

    value = float(evaluate(vectors).value("metric"))

    error = (net(x) - y[:, 0]).square().mean()
    assert value == pytest.approx(float(error))


@pytest.mark.parametrize("num_classes", [3, 4, 7])
def test_f1_is_the_mean_over_classes_that_have_samples(num_classes):
    """As scikit-learn's, with the labels that occur."""
    draw = torch.Generator()
    draw.manual_seed(num_classes)
    labels = torch.randint(0, 2, (50,), generator=draw)
    probabilities = torch.rand(50, num_classes, generator=draw)

    score = ClassScore("f1")
    score.update(probabilities, labels)
    expected = sklearn.metrics.f1_score(
        labels,
        probabilities.argmax(1),
        average="macro",
        labels=[0, 1],
        zero_division=0,
    )

    assert float(score.compute()) == pytest.approx(expected)


class GivesClasses(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        return logits.argmax(1)


def test_class_numbers_are_scored_and_not_predicted():
    """Half of class 0 and half of class 2 would be class 1."""
    module = GivesClasses(2, 3)
    space = ParameterSpace(module)
    labels = torch.tensor([0, 1])
    evaluator = ModelEvaluator(
        module,
        space,
        [(torch.eye(2), labels)],
        metric=torchmetrics.Accuracy("multiclass", num_classes=3),
    )
    model = space.read(module)
    scores = evaluator(model[None])

    assert evaluator.form is None
    assert len(scores.value("metric")) == 1


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


class Cosine(nn.Linear):
    def forward(self, x):
        cosines = nn.functional.cosine_similarity(x, self.weight)
        return cosines[:, None]


#: Last layers.
WITH_A_BOUND = {
    "a rate": Exp,
    "a positive number": nn.Softplus,
    "a share": nn.Sigmoid,
    "a number in -1 .. 1": nn.Tanh,
}
WITHOUT_A_BOUND = {"a line": nn.Identity, "a leaky number": nn.LeakyReLU}


def make_network(layer) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), layer())


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", [*WITH_A_BOUND, *WITHOUT_A_BOUND, "a cosine"])
def test_outputs_with_a_bound_are_known_before_training(kind):
    net = Cosine(3, 1)
    if kind != "a cosine":
        last_layers = WITH_A_BOUND | WITHOUT_A_BOUND
        net = make_network(last_layers[kind])

    x = torch.rand(8, 3)

    measure = torchmetrics.MeanSquaredError()
    scores_models = make_evaluator(net, measure, [(x, x.sum(1))])

    assert scores_models.form is not None
    assert scores_models.form.is_bounded == (kind not in WITHOUT_A_BOUND)


class Rounded(nn.Module):
    def forward(self, x):
        return x.round()


def test_whole_numbers_are_scored_and_not_predicted():
    """Between the counts 2 and 3 lies no count."""
    x = 4 * torch.rand(8, 3)

    counts = make_evaluator(make_network(Rounded), torchmetrics.MeanSquaredError(), [(x, x.sum(1))])

    assert counts.form is None


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", ["a rate", "a positive number", "a share"])
def test_predicted_outputs_are_such_that_forward_could_give(kind):
    """All outputs are above 0: the deviance of a number below 0 is an error."""
    torch.manual_seed(0)
    x = torch.rand(8, 3)
    net = make_network(WITH_A_BOUND[kind])
    deviance = torchmetrics.TweedieDevianceScore(power=1.0)
    measure = performance_of("mine", deviance, "min")
    targets = x.sum(dim=1)
    scores_models = make_evaluator(net, measure, [(x, targets)])

    trained = few_coalitions(3, "singles")
    num_parameters = 3 + 1
    # By the factor, the models' outputs are so far apart that a linear prediction of them would be below 0.
    far_apart_models = 3 * torch.randn(len(trained), num_parameters)
    scores = scores_models(far_apart_models, keep=True)
    utilities = -scores.value("metric")
    output_score = OutputScore.for_evaluator(scores_models, measure)

    assert output_score is not None
    assert scores.outputs is not None

    weights = torch.ones(3)
    (estimate,) = output_score.shapley(trained, [utilities], [scores.outputs], weights)

    is_everyone = trained.all(dim=1)
    is_nobody = ~trained.any(dim=1)
    gain = float(utilities[is_everyone] - utilities[is_nobody])
    assert float(estimate.values.sum()) == pytest.approx(gain, rel=1e-4)
