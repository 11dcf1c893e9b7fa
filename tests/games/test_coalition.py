"""Coalition games and evaluators against the naive way: average state_dicts, load, predict, score by scikit-learn."""

import copy
import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.games import CoalitionGames, CoalitionUtility, ModelEvaluator, Renormalized
from flsv.scores import Measure
from flsv.utilities.seeding import isolated_rngs
from helpers import make_generator, refused, warns
from helpers.fits import all_samples

CLASSES = 4


class NetWithNormDropoutAndBuffer(nn.Module):
    """Convolution, BatchNorm, dropout, and buffers that a vector does not hold."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, CLASSES)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, x):
        features = self.drop(self.norm(self.conv(x)).relu())
        return self.head(features.flatten(1)) * self.scale


def make_network():
    torch.manual_seed(0)
    return NetWithNormDropoutAndBuffer()


def make_batches(num_samples=70, batch_size=16):
    generator = make_generator(5)
    x = torch.randn(num_samples, 1, 6, 6, generator=generator)
    y = torch.randint(CLASSES, (num_samples,), generator=generator)
    return list(zip(x.split(batch_size), y.split(batch_size)))


NUM_CLIENTS = 4


def draw_noise(space, generator):
    """Noise for the models of all clients: buffers, among them variances, become no smaller."""
    noise = 0.3 * torch.randn(NUM_CLIENTS, space.size, generator=generator)
    noise[:, space.num_parameters :].abs_()
    return noise


def make_round(net, own_starts=False):
    """A round in which clients start from the global model, or each from a model of its own."""
    space = ParameterSpace(net)
    generator = make_generator(7)
    global_model = space.read(net)
    starts = global_model.repeat(NUM_CLIENTS, 1)
    if own_starts:
        starts += draw_noise(space, generator)

    return Round(
        round_index=0,
        client_ids=torch.arange(NUM_CLIENTS),
        num_samples=torch.randint(5, 50, (NUM_CLIENTS,), generator=generator),
        global_vector=global_model,
        client_vectors=starts + draw_noise(space, generator),
        space=space,
        starts=list(starts) if own_starts else None,
    )


MASKS = torch.tensor(list(itertools.product([False, True], repeat=4)))


def weights_of_clients(round, weighting):
    if weighting == "samples":
        return round.num_samples.double()
    if weighting == "uniform":
        return torch.ones(NUM_CLIENTS).double()
    if isinstance(weighting, Renormalized):
        return weighting.weights.double()
    return weighting.double()


def weighted_sum(states, name, weights):
    """Of a parameter or a buffer of the clients' states."""
    return sum(weight * state[name].double() for weight, state in zip(weights, states))


def naive_model(net, round, mask, weighting, server_lr=1.0):
    """The coalition's model by averaging state_dicts entry by entry, in double precision."""
    model = copy.deepcopy(net).eval()
    if not mask.any():
        return model

    client_states = [round.space.unflatten(vector) for vector in round.client_vectors]
    start_states = [round.space.unflatten(vector) for vector in round.matrix.starts]
    weights = weights_of_clients(round, weighting) * mask
    shares = weights / weights.sum()
    # Fixed weights need not sum up to 1: a coalition's step is then smaller. Buffers are averaged all the same.
    step_weights = weights if isinstance(weighting, Tensor) else shares

    state = model.state_dict()
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if name in parameters:
            new_value = weighted_sum(client_states, name, step_weights)
            old_value = weighted_sum(start_states, name, step_weights)
            state[name] = (value.double() + server_lr * (new_value - old_value)).float()
        elif value.is_floating_point():
            state[name] = weighted_sum(client_states, name, shares).float()

    model.load_state_dict(state)
    return model


@torch.no_grad()
def naive_scores(model, data):
    logits = torch.cat([model(x) for x, _ in data])
    labels = torch.cat([y for _, y in data]).numpy()
    predicted = logits.argmax(-1).numpy()
    probabilities = logits.double().softmax(-1).numpy()
    classes = range(CLASSES)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes without samples
        recalls = sk.recall_score(labels, predicted, labels=classes, average=None, zero_division=0)
        return {
            "accuracy": sk.accuracy_score(labels, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(labels, predicted),
            "negative_loss": -sk.log_loss(labels, probabilities, labels=classes),
            "per_class_accuracy": recalls,
            "f1": sk.f1_score(labels, predicted, labels=classes, average="macro"),
        }


def make_evaluator(net, **options):
    arguments = {"batches": make_batches(), "num_classes": CLASSES, **options}
    return ModelEvaluator(net, ParameterSpace(net), **arguments)


def make_utility(**options):
    net = make_network()
    return CoalitionUtility(make_round(net), make_evaluator(net), **options)


WEIGHTS = torch.tensor([0.5, 0.1, 0.0, 0.7])  # of the four clients
NAMED_METRICS = ["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy"]
#: Of torchmetrics, which has no name in flsv: an evaluator of its own computes it.
F1_SCORE = Measure(MulticlassF1Score(CLASSES, average="macro"), "max")


def naive_scores_of_coalitions(net, round, data, weighting, server_lr):
    scores = []
    for mask in MASKS:
        # Without a member that has a weight, it is the global model.
        has_weight = mask & (weights_of_clients(round, weighting) > 0)
        model = naive_model(net, round, has_weight, weighting, server_lr)
        scores.append(naive_scores(model, data))
    return scores


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("weighting", "server_lr", "own_starts"),
    [
        ("uniform", 1.0, False),
        ("samples", 0.6, False),
        (WEIGHTS, 1.7, True),
        (Renormalized(WEIGHTS), 0.6, True),
    ],
)
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_game_utilities_equal_naive_averaging_scored_by_scikit_learn(
    backend, weighting, server_lr, own_starts
):
    net = make_network()
    round = make_round(net, own_starts=own_starts)
    evaluator = make_evaluator(net, backend=backend)
    f1_evaluator = make_evaluator(net, num_classes=None, metric=F1_SCORE.of, backend=backend)
    # None is the key of the evaluator whose scores have names.
    games = CoalitionGames([evaluator, f1_evaluator], server_lr=server_lr)
    games.begin(round)

    utilities = {}
    for name in NAMED_METRICS:
        utility = games.utility(name, weighting)
        utilities[name] = utility(MASKS)
    f1_utility = games.utility(F1_SCORE, weighting)
    utilities["f1"] = f1_utility(MASKS)

    naive = naive_scores_of_coalitions(net, round, make_batches(), weighting, server_lr)
    for name, values in utilities.items():
        expected = np.stack([scores[name] for scores in naive])
        np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=2e-6, err_msg=name)
    num_evaluators = 2
    assert games.evaluations == num_evaluators * len(MASKS)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("weighting", "message"),
    [
        pytest.param("equal", "weighting='equal'", id="unknown name"),
        pytest.param(torch.ones(3), "expected 4 weights", id="too few"),
        pytest.param(torch.tensor([1, 1, 1, -0.1]), "not negative", id="negative"),
        pytest.param(Renormalized(torch.ones(3)), "expected 4 weights", id="too few renormalized"),
    ],
)
def test_coalition_utility_with_wrong_weights_is_refused(weighting, message):
    with refused(message):
        make_utility(weighting=weighting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "masks",
    [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)],
    ids=["numbers", "too many clients"],
)
def test_coalition_utility_with_wrong_masks_raises(masks):
    with pytest.raises(ValueError, match=r"masks bool \[K, 4\]"):
        make_utility()(masks)


autocast_to_bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


def negative_loss_of(net, **options):
    evaluate = make_evaluator(net, **options)
    model = evaluate.space.read(net)
    return evaluate(model[None]).value("negative_loss").item()


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_context_of_an_evaluator_applies_to_the_forward_and_not_to_the_loss(backend):
    net = make_network()
    x, y = all_samples(make_batches())
    with autocast_to_bfloat16():
        logits = net.eval()(x)
    expected = -nn.functional.cross_entropy(logits.float(), y).item()

    value = negative_loss_of(net, backend=backend, context=autocast_to_bfloat16)
    value_without_context = negative_loss_of(net, backend=backend)

    assert value == pytest.approx(expected, abs=2e-3)
    assert abs(value - value_without_context) > 1e-5
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluator_without_a_context_does_not_use_the_callers_autocast(backend):
    net = make_network()
    expected = naive_scores(net.eval(), make_batches())["negative_loss"]

    with autocast_to_bfloat16():
        value = negative_loss_of(net, backend=backend)

    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.fast_rows
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_model_with_nan_or_inf_has_no_hits_and_no_finite_loss(backend):
    net = make_network()
    space = ParameterSpace(net)
    model = space.read(net)
    model_of_nan = torch.full_like(model, torch.nan)
    model_with_inf = model.clone()
    positions_of_last_weights = space.head.weight
    model_with_inf[positions_of_last_weights] = torch.inf
    evaluator = make_evaluator(net, backend=backend, metric=MulticlassF1Score(CLASSES))

    scores = evaluator(torch.stack([model, model_of_nan, model_with_inf]))

    _, loss_of_nan, _ = scores.values["loss"]
    _, hits_of_nan, _ = scores.values["correct"]
    assert loss_of_nan.isnan()
    assert hits_of_nan.sum() == 0
    assert scores.values["loss"].isfinite().tolist() == [True, False, False]
    assert scores.value("negative_loss").isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("batch_size", [600, 7])
def test_scores_do_not_depend_on_the_size_of_validation_batches(batch_size):
    net = make_network()
    data = make_batches(600, batch_size)
    evaluator = make_evaluator(net, batches=data)
    model = evaluator.space.read(net)

    scores = evaluator(model[None])

    expected = naive_scores(net.eval(), data)
    accuracy = scores.value("accuracy").item()
    negative_loss = scores.value("negative_loss").item()
    assert accuracy == pytest.approx(expected["accuracy"])
    assert negative_loss == pytest.approx(expected["negative_loss"], abs=1e-6)


THREE_IMAGES = torch.zeros(3, 1, 6, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": None}, "neither num_classes nor metric"),
        ({"batches": []}, "no validation samples"),
        ({"batches": [(THREE_IMAGES, torch.zeros(3))]}, "integer classes"),
        ({"batches": [(THREE_IMAGES, torch.tensor([0, 0]))]}, "3 inputs and 2 labels"),
        ({"batches": [(THREE_IMAGES, torch.tensor([4, 4, 4]))]}, r"4 \.\. 4.*0 \.\. 3"),
        ({"num_classes": 9}, r"logits \[70, 9\] are expected"),
    ],
)
def test_model_evaluator_with_wrong_arguments_raises(change, message):
    with refused(message):
        make_evaluator(make_network(), **change)


class PredictsTwoNoisyNumbers(nn.Linear):
    def __init__(self):
        super().__init__(36, 2)

    def forward(self, x):
        numbers = super().forward(x.flatten(1))
        return numbers + 0.1 * torch.randn(len(x), 2)


def make_batches_with_two_targets():
    batches = []
    for x, y in make_batches():
        brightness = x.sum((1, 2, 3))
        targets = torch.stack([brightness, y.float()], dim=1)
        batches.append((x, targets))
    return batches


SEED_OF_EVALUATION = 4


def evaluate_errors(net, vectors, backend):
    """The mean squared errors of models, two models at a time."""
    evaluate = make_evaluator(
        net,
        batches=make_batches_with_two_targets(),
        num_classes=None,
        metric=MeanSquaredError(),
        chunk=2,
        seed=SEED_OF_EVALUATION,
        backend=backend,
    )
    assert evaluate.backend == backend
    return evaluate(vectors).value("metric")


@torch.no_grad()
def error_by_hand(net, vector):
    ParameterSpace(net).write(net, vector)
    squared_errors = []
    with isolated_rngs(SEED_OF_EVALUATION, "utility"):
        for x, targets in make_batches_with_two_targets():
            squared_errors.append((net(x) - targets) ** 2)
    return torch.cat(squared_errors).mean().item()


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_each_model_is_evaluated_with_the_random_numbers_of_the_seed(backend):
    net = PredictsTwoNoisyNumbers()
    model = ParameterSpace(net).read(net)
    vectors = model + 0.1 * torch.randn(5, len(model))

    errors = evaluate_errors(net, vectors, backend)

    expected = [error_by_hand(net, vector) for vector in vectors]
    assert errors.tolist() == pytest.approx(expected, rel=1e-5)


class EvaluatorWithMemoryForThreeModels(ModelEvaluator):
    """Notes the sizes of its chunks."""

    def _score(self, num_models, *arguments):
        self.chunk_sizes.append(num_models)
        if num_models > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return super()._score(num_models, *arguments)


def test_chunk_of_models_that_runs_out_of_memory_is_halved():
    net = make_network()
    round = make_round(net)
    evaluator = EvaluatorWithMemoryForThreeModels(
        net, round.space, make_batches(), num_classes=CLASSES, backend="vmap", chunk=7
    )
    evaluator.chunk_sizes = []

    values = CoalitionUtility(round, evaluator)(MASKS)

    # The first seven models fail, and are then scored three at a time, as are all others.
    assert evaluator.chunk_sizes == [7, 3, 3, 3, 3, 3, 1]
    assert evaluator.chunk == 3
    expected_values = CoalitionUtility(round, make_evaluator(net))(MASKS)
    assert torch.equal(values, expected_values)


class BranchesOnItsOutputs(nn.Linear):
    """Looks at its weights' values, which vmap cannot."""

    def forward(self, x):
        logits = super().forward(x.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


def test_models_that_vmap_cannot_handle_are_evaluated_one_at_a_time():
    net = BranchesOnItsOutputs(36, CLASSES)
    models = make_round(net).client_vectors
    with warns("vmap cannot run BranchesOnItsOutputs"):
        evaluator = make_evaluator(net, backend="vmap")

    losses = evaluator(models).value("negative_loss")

    expected_losses = make_evaluator(net)(models).value("negative_loss")
    assert torch.equal(losses, expected_losses)


def tensors_of(net):
    """The identity, the memory and the values of each tensor."""
    facts = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        facts[name] = id(tensor), tensor.data_ptr(), tensor.detach().tolist()
    return facts


def flags_of(net):
    are_training = [layer.training for layer in net.modules()]
    require_gradients = [parameter.requires_grad for parameter in net.parameters()]
    return are_training + require_gradients


def make_network_in_training():
    """A network with a gradient and counted batches, whose norm alone is not in training."""
    net = make_network()
    net.train()
    net.norm.eval()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.norm.num_batches_tracked.fill_(17)
    return net


@pytest.mark.fast_rows
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluator_changes_neither_module_nor_random_state(backend):
    net = make_network_in_training()
    tensors_before = tensors_of(net)
    flags_before = flags_of(net)
    round = make_round(net)
    metric = MulticlassF1Score(CLASSES)
    generator_state = torch.get_rng_state()

    evaluator = make_evaluator(net, metric=metric, backend=backend)
    CoalitionUtility(round, evaluator)(MASKS)
    evaluator.gradient(round.global_vector)

    assert tensors_of(net) == tensors_before
    assert flags_of(net) == flags_before
    assert net.conv.weight.grad.eq(1).all()
    assert not metric.update_called
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert torch.is_grad_enabled()


def begin_games():
    net = make_network()
    games = CoalitionGames([make_evaluator(net)])
    games.begin(make_round(net))
    return games


@pytest.mark.slow
def test_metrics_of_a_round_share_the_evaluation_of_each_coalition():
    games = begin_games()
    accuracy = games.utility("accuracy")
    negative_loss = games.utility("negative_loss")
    rows = [12, 12, 0]  # two coalitions, one of them twice

    accuracies = accuracy(MASKS[rows])
    assert games.evaluations == 2

    losses = negative_loss(MASKS)
    assert torch.equal(accuracy(MASKS)[rows], accuracies)
    assert torch.equal(negative_loss(MASKS[rows]), losses[rows])
    assert games.evaluations == len(MASKS)
    assert accuracy.evaluations == len(MASKS)
    assert negative_loss.evaluations == len(MASKS)


@pytest.mark.slow
def test_metrics_with_another_weighting_share_only_the_empty_coalition():
    games = begin_games()
    accuracy = games.utility("accuracy")
    weighted_accuracy = games.utility("accuracy", WEIGHTS)
    weighted_loss = games.utility("negative_loss", WEIGHTS.double())

    for utility in (accuracy, weighted_accuracy, weighted_loss):
        utility(MASKS)

    num_weightings = 2
    num_shared_coalitions = 1
    assert games.evaluations == num_weightings * len(MASKS) - num_shared_coalitions


def test_evaluations_of_all_rounds_are_counted():
    games = begin_games()
    utility = games.utility()
    utility(MASKS[:3])

    games.begin(make_round(make_network()))
    utility_of_next_round = games.utility()
    utility_of_next_round(MASKS[:2])
    games.end()

    assert games.total_evaluations == 3 + 2


def test_games_that_have_ended_have_no_utility():
    games = begin_games()
    games.end()

    with pytest.raises(RuntimeError, match="begin"):
        games.utility()
