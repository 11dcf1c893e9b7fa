"""Coalition games and evaluators against the naive way: average state_dicts, load, predict, score by scikit-learn."""

import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.games import CoalitionGames, CoalitionUtility, ModelEvaluator, Renormalized, Scores
from flsv.scores import ModelScore
from flsv.utilities.seeding import isolated_rngs
from helpers import make_generator, refused, warns

CLASSES = 4


class Net(nn.Module):
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


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def make_batches(samples: int = 70, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = make_generator(5)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size)))


def make_round(net: nn.Module, own_starts: bool = False) -> Round:
    num_clients = 4
    space = ParameterSpace(net)
    num_parameters = space.num_parameters
    generator = make_generator(7)

    def add_noise(models: Tensor) -> Tensor:
        noise = torch.randn(num_clients, space.size, generator=generator)
        buffer_noise = noise[:, num_parameters:]
        noise[:, num_parameters:] = buffer_noise.abs()  # a running variance is positive
        return models + 0.3 * noise

    global_model = space.read(net)
    if own_starts:
        initial_models = add_noise(global_model)  # [num_clients, P]
        starts = list(initial_models)
    else:
        initial_models = global_model
        starts = None  # clients start from the global model

    num_samples = torch.randint(5, 50, (num_clients,), generator=generator)
    return Round(
        round_index=0,
        client_ids=torch.arange(num_clients),
        num_samples=num_samples,
        global_vector=global_model,
        client_vectors=add_noise(initial_models),
        space=space,
        starts=starts,
    )


MASKS = torch.tensor(list(itertools.product([False, True], repeat=4)))


def coalition_weights(
    round: Round, mask: Tensor, weighting
) -> tuple[dict[int, float], dict[int, float]]:
    """The members' weights in parameters and in buffers, in plain Python."""
    members = mask.nonzero().flatten().tolist()
    if weighting == "samples":
        weights = {client: float(round.num_samples[client]) for client in members}
    elif weighting == "uniform":
        weights = dict.fromkeys(members, 1.0)
    elif isinstance(weighting, Renormalized):
        weights = {client: float(weighting.weights[client]) for client in members}
    else:
        weights = {client: float(weighting[client]) for client in members}

    total = sum(weights.values())
    shares = {client: weight / total for client, weight in weights.items()}
    parameter_weights = shares
    if isinstance(weighting, Tensor):
        # Fixed weights need not sum up to 1: a coalition's step is then smaller. Buffers are averaged all the same.
        parameter_weights = weights

    buffer_weights = shares
    return parameter_weights, buffer_weights


def naive_model(
    net: nn.Module, round: Round, mask: Tensor, weighting, server_lr: float = 1.0
) -> nn.Module:
    """The coalition's model by averaging state_dicts entry by entry, in double precision."""
    model = copy.deepcopy(net).eval()
    if not mask.any():
        return model

    client_states = [round.space.unflatten(vector) for vector in round.client_vectors]
    start_states = [round.space.unflatten(vector) for vector in round.matrix.starts]
    weights, shares = coalition_weights(round, mask, weighting)
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        total = torch.zeros_like(value, dtype=torch.float64)
        if name in parameters:
            for i, weight in weights.items():
                update = client_states[i][name].double() - start_states[i][name].double()
                total += weight * update
            state[name] = (value.double() + server_lr * total).float()
        elif value.is_floating_point():
            for i, share in shares.items():
                total += share * client_states[i][name].double()
            state[name] = total.float()

    model.load_state_dict(state)
    return model


@torch.no_grad()
def naive_scores(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
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


def make_utility(**options) -> CoalitionUtility:
    net = make_network()
    round = make_round(net)
    evaluator = ModelEvaluator(net, round.space, make_batches(), num_classes=CLASSES)
    return CoalitionUtility(round, evaluator, **options)


WEIGHTS = torch.tensor([0.5, 0.1, 0.0, 0.7])  # of the four clients
NAMED_METRICS = ["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy"]
#: Of torchmetrics, which has no name in flsv: an evaluator of its own computes it.
F1_SCORE = ModelScore(MulticlassF1Score(CLASSES, average="macro"), "max")


def naive_scores_of_coalitions(
    net: nn.Module,
    round: Round,
    data: list[tuple[Tensor, Tensor]],
    weighting,
    server_lr: float,
) -> list[dict[str, Any]]:
    scores = []
    for mask in MASKS:
        has_weight = isinstance(weighting, str) or WEIGHTS[mask].any()
        if not has_weight:
            mask = torch.zeros_like(mask)  # nobody with a weight: the global model
        model = naive_model(net, round, mask, weighting, server_lr)
        scores.append(naive_scores(model, data))
    return scores


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
    data = make_batches()
    round = make_round(net, own_starts=own_starts)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend)
    f1_evaluator = ModelEvaluator(net, round.space, data, metric=F1_SCORE.of, backend=backend)
    games = CoalitionGames({None: evaluator, F1_SCORE: f1_evaluator}, server_lr=server_lr)
    games.begin(round)

    utilities = {}
    for name in NAMED_METRICS:
        utilities[name] = games.utility(name, weighting)(MASKS)
    utilities["f1"] = games.utility(F1_SCORE, weighting)(MASKS)

    naive = naive_scores_of_coalitions(net, round, data, weighting, server_lr)
    for name, values in utilities.items():
        expected = np.stack([scores[name] for scores in naive])
        np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=2e-6, err_msg=name)
    assert games.evaluations == 2 * len(MASKS)  # by both evaluators


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


@pytest.mark.parametrize(
    "masks",
    [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)],
    ids=["numbers", "too many clients"],
)
def test_coalition_utility_with_wrong_masks_raises(masks):
    with pytest.raises(ValueError, match=r"masks bool \[K, 4\]"):
        make_utility()(masks)


@pytest.mark.fast_rows
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_autocast_context_applies_to_the_forward_only(backend):
    net = make_network()
    data = make_batches()
    round = make_round(net)
    mask = torch.tensor([[True, False, True, True]])

    def loss(context=None) -> float:
        evaluator = ModelEvaluator(
            net,
            round.space,
            data,
            num_classes=CLASSES,
            backend=backend,
            context=context,
        )
        return CoalitionUtility(round, evaluator, metric="negative_loss")(mask).item()

    model = naive_model(net, round, mask[0], "uniform")
    exact = naive_scores(model, data)["negative_loss"]
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.cat([model(x) for x, _ in data]).float().detach()

    y = torch.cat([y for _, y in data])
    expected = -nn.functional.cross_entropy(half, y).item()
    loss_in_half = loss(lambda: torch.autocast("cpu", torch.bfloat16))

    assert loss_in_half == pytest.approx(expected, abs=2e-3)
    assert abs(loss_in_half - exact) > 1e-5

    with torch.autocast("cpu", torch.bfloat16):
        assert loss() == pytest.approx(exact, abs=1e-6)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.fast_rows
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_model_with_nan_or_inf_has_no_hits_and_no_finite_loss(backend):
    net = make_network()
    space = ParameterSpace(net)
    vectors = space.read(net).repeat(3, 1)
    vectors[1] = torch.nan
    vectors[2, space.head.weight] = torch.inf
    evaluator = ModelEvaluator(
        net,
        space,
        make_batches(),
        num_classes=CLASSES,
        backend=backend,
        metric=MulticlassF1Score(CLASSES),
    )
    scores = evaluator(vectors)

    assert scores.values["loss"].isfinite().tolist() == [True, False, False]
    assert scores.values["loss"][1].isnan()
    assert scores.values["correct"][1].sum() == 0
    assert scores.value("negative_loss").isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("size", [600, 7])
def test_scores_do_not_depend_on_the_size_of_validation_batches(size):
    net = make_network()
    space = ParameterSpace(net)
    data = make_batches(600, size)
    evaluator = ModelEvaluator(net, space, data, num_classes=CLASSES)

    scores = evaluator(space.read(net)[None])

    expected = naive_scores(net.eval(), data)
    accuracy = scores.value("accuracy").item()
    negative_loss = scores.value("negative_loss").item()
    assert accuracy == pytest.approx(expected["accuracy"])
    assert negative_loss == pytest.approx(expected["negative_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": None}, "neither num_classes nor metric"),
        ({"batches": []}, "no validation samples"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3))]}, "integer classes"),
        (
            {"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(2).long())]},
            "3 inputs and 2 labels",
        ),
        (
            {"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([4]))]},
            r"4 \.\. 4.*0 \.\. 3",
        ),
        ({"num_classes": 9}, r"logits \[70, 9\] are expected"),
    ],
)
def test_model_evaluator_with_wrong_arguments_raises(change, message):
    net = make_network()
    arguments = {"batches": make_batches(), "num_classes": CLASSES, **change}
    with refused(message):
        ModelEvaluator(net, ParameterSpace(net), arguments.pop("batches"), **arguments)


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) + 0.1 * torch.randn(len(x), 2)


def test_models_evaluated_by_vmap_draw_the_same_random_numbers_as_one_by_one():
    """A regression of two numbers, against the metric of each model's outputs."""
    torch.manual_seed(0)
    net = Drawing(36, 2)
    data = []
    for x, y in make_batches():
        brightness = x.sum((1, 2, 3))
        targets = torch.stack([brightness, y.float()], 1)
        data.append((x, targets))

    space = ParameterSpace(net)
    noise = torch.randn(5, space.size)
    vectors = space.read(net) + 0.1 * noise

    def values(backend) -> Tensor:
        evaluator = ModelEvaluator(
            net,
            space,
            data,
            metric=MeanSquaredError(),
            backend=backend,
            chunk=2,
            seed=4,
        )
        of_models = evaluator(vectors).value("metric")

        assert evaluator.backend == backend

        return of_models

    torch.testing.assert_close(values("vmap"), values("serial"), rtol=1e-6, atol=0)

    with isolated_rngs(4, "utility"), torch.no_grad():
        space.write(net, vectors[3])
        errors = torch.cat([(net(x) - y) ** 2 for x, y in data])

    expected = errors.mean().item()
    assert values("serial")[3].item() == pytest.approx(expected, rel=1e-5)


def test_chunk_of_models_that_runs_out_of_memory_is_halved(monkeypatch):
    net = make_network()
    round = make_round(net)
    evaluator = ModelEvaluator(
        net,
        round.space,
        make_batches(),
        num_classes=CLASSES,
        backend="vmap",
        chunk=7,
    )
    original = evaluator._score
    chunks = []

    def score(num_models: int, *arguments) -> Scores:
        scores = original(num_models, *arguments)
        if num_models:
            chunks.append(num_models)
        if num_models > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return scores

    monkeypatch.setattr(evaluator, "_score", score)
    values = CoalitionUtility(round, evaluator)(MASKS)

    assert chunks == [7, 3, 3, 3, 3, 3, 1]
    assert evaluator.chunk == 3

    reference = ModelEvaluator(net, round.space, make_batches(), num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, reference)(MASKS))


class Branching(nn.Linear):
    """Looks at its weights' values, which vmap cannot."""

    def forward(self, x):
        logits = super().forward(x.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


def test_a_module_that_vmap_cannot_handle_is_evaluated_one_at_a_time():
    net = Branching(36, CLASSES)
    data = make_batches()
    round = make_round(net)
    with warns("vmap cannot run Branching"):
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")

    reference = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    expected = reference(round.client_vectors).value("negative_loss")

    assert torch.equal(evaluator(round.client_vectors).value("negative_loss"), expected)


@pytest.mark.fast_rows
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluator_changes_neither_module_nor_random_state(backend):
    net = make_network()
    net.train()
    net.norm.eval()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.norm.num_batches_tracked.fill_(17)

    def tensors() -> dict[str, Any]:
        named_tensors = net.state_dict(keep_vars=True).items()
        return {name: (id(t), t.data_ptr(), t.detach().tolist()) for name, t in named_tensors}

    def flags() -> list[Any]:
        layers_flags = [layer.training for layer in net.modules()]
        return [*layers_flags, *(p.requires_grad for p in net.parameters())]

    tensors_at_first = tensors()
    flags_at_first = flags()
    round = make_round(net)
    metric = MulticlassF1Score(CLASSES)
    rng = torch.get_rng_state()

    evaluator = ModelEvaluator(
        net,
        round.space,
        make_batches(),
        num_classes=CLASSES,
        metric=metric,
        backend=backend,
    )
    CoalitionUtility(round, evaluator)(MASKS)
    evaluator.gradient(round.global_vector)

    assert tensors() == tensors_at_first
    assert flags() == flags_at_first
    assert net.conv.weight.grad.eq(1).all()
    assert metric.update_count == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


def test_metrics_of_a_round_share_every_evaluation():
    net = make_network()
    round = make_round(net)
    evaluator = ModelEvaluator(net, round.space, make_batches(), num_classes=CLASSES)
    games = CoalitionGames({None: evaluator})
    num_coalitions = len(MASKS)

    games.begin(round)
    accuracy = games.utility("accuracy")
    loss = games.utility("negative_loss")
    rows = [12, 12, 0]  # a coalition twice, and nobody
    accuracies = accuracy(MASKS[rows])
    assert games.evaluations == 2

    losses = loss(MASKS)
    assert torch.equal(accuracy(MASKS)[rows], accuracies)
    assert torch.equal(loss(MASKS[rows]), losses[rows])
    assert accuracy.evaluations == loss.evaluations == games.evaluations == num_coalitions

    # Another weighting gives other models, apart from the empty coalition's.
    games.utility("accuracy", WEIGHTS)(MASKS)
    games.utility("negative_loss", WEIGHTS.double())(MASKS)
    assert games.evaluations == 2 * num_coalitions - 1

    games.begin(make_round(net))
    games.utility()(MASKS[rows])
    games.end()
    assert games.total_evaluations == 2 * num_coalitions - 1 + 2

    with pytest.raises(RuntimeError, match="begin"):
        games.utility()
