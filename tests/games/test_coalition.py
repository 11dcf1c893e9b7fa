"""Coalition games against the naive way: average state_dicts, load, predict, score with scikit-learn."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
import toys
from lightning.pytorch.plugins import HalfPrecision
from sklearn import metrics as sk
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score, MulticlassHingeLoss

from flsv.errors import ConfigurationError
from flsv.games import CoalitionGames, CoalitionTable, CoalitionUtility, ModelEvaluator, Renormalized
from flsv.games.evaluation import vmapped
from flsv.games.evaluation.coalition_models import CoalitionModels
from flsv.parameters import ParameterSpace
from flsv.round import Round

CLASSES = 4


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, and buffers that a vector does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, CLASSES)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu()).flatten(1)) * self.scale


def module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def batches(samples: int = 70, size: int = 16, classes: int = CLASSES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size)))


def a_round(net: nn.Module, clients: int = 4, own_starts: bool = False, scale: float = 1.0) -> Round:
    space = ParameterSpace(net)
    generator = torch.Generator().manual_seed(7)

    def models(like: Tensor) -> Tensor:
        noise = scale * torch.randn(clients, space.size, generator=generator)
        noise[:, space.num_parameters :] = noise[:, space.num_parameters :].abs()  # a running variance is positive
        return like + 0.3 * noise

    start = space.read(net)
    starts = models(start) if own_starts else None
    return Round(
        round_index=0,
        client_ids=torch.arange(clients),
        num_samples=torch.randint(5, 50, (clients,), generator=generator),
        global_vector=start,
        client_vectors=models(start if starts is None else starts),
        space=space,
        starts=None if starts is None else list(starts),
    )


def all_masks(clients: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=clients)))


def coalition_weights(round: Round, mask: Tensor, weighting: Any) -> tuple[dict[int, float], dict[int, float]]:
    """The members' weights in parameters and in buffers, in plain Python."""
    members = mask.nonzero().flatten().tolist()
    if not isinstance(weighting, str):
        given = weighting.weights if isinstance(weighting, Renormalized) else weighting
        raw = {i: float(given[i]) for i in members}
    else:
        raw = {i: float(round.num_samples[i]) if weighting == "samples" else 1.0 for i in members}
    total = sum(raw.values())
    shares = {i: w / total for i, w in raw.items()}
    return (raw if isinstance(weighting, Tensor) else shares), shares


def naive_model(net: nn.Module, round: Round, mask: Tensor, weighting: Any, server_lr: float = 1.0) -> nn.Module:
    """The coalition's model by averaging state_dicts entry by entry, in double precision."""
    model = copy.deepcopy(net).eval()
    if not mask.any():
        return model
    parts = {i: round.space.unflatten(round.client_vectors[i]) for i in range(len(round))}
    starts = {i: round.space.unflatten(round.matrix.starts[i]) for i in range(len(round))}
    weights, shares = coalition_weights(round, mask, weighting)
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if name in parameters:
            moves = [w * (parts[i][name].double() - starts[i][name].double()) for i, w in weights.items()]
            state[name] = (value.double() + server_lr * sum(moves)).float()
        elif value.is_floating_point():
            state[name] = sum(w * parts[i][name].double() for i, w in shares.items()).float()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def naive_scores(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    logits = torch.cat([model(x) for x, _ in data])
    y = torch.cat([y for _, y in data]).numpy()
    predicted = logits.argmax(-1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes without samples
        return {
            "accuracy": sk.accuracy_score(y, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
            "negative_loss": -sk.log_loss(y, logits.double().softmax(-1).numpy(), labels=range(CLASSES)),
            "per_class_accuracy": sk.recall_score(y, predicted, labels=range(CLASSES), average=None, zero_division=0),
            "custom": sk.f1_score(y, predicted, labels=range(CLASSES), average="macro"),
        }


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The tiny reference models crawl when several intra-op threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


METRICS = ["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy", "custom"]
FIXED = torch.tensor([0.5, 0.1, 0.0, 0.7])


@pytest.mark.parametrize(
    ("weighting", "server_lr", "own_starts"),
    [
        ("uniform", 1.0, False),
        ("samples", 0.6, False),
        (FIXED, 1.0, False),
        (FIXED, 1.7, True),
        (Renormalized(FIXED), 0.6, True),
    ],
)
@pytest.mark.parametrize("backend", ["threads", "vmap", "serial"])
def test_every_metric_against_naive_averaging_and_scikit_learn(
    backend: Any, weighting: Any, server_lr: float, own_starts: bool
) -> None:
    net, data = module(), batches()
    round = a_round(net, own_starts=own_starts)
    metric = MulticlassF1Score(CLASSES, average="macro")
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, metric=metric, backend=backend)
    games = CoalitionGames(evaluator, server_lr=server_lr)
    games.begin(round)
    masks = all_masks(4)
    expected = []
    for mask in masks:
        if not isinstance(weighting, str) and mask.any() and not FIXED[mask].any():
            mask = torch.zeros_like(mask)  # nobody with a weight: the global model
        expected.append(naive_scores(naive_model(net, round, mask, weighting, server_lr), data))
    for name in METRICS:
        utility = games.utility(name, weighting)
        reference = np.stack([scores[name] for scores in expected])
        np.testing.assert_allclose(utility(masks).numpy(), reference, rtol=0, atol=2e-6, err_msg=name)
    assert games.evaluations == 16


def test_classes_without_samples() -> None:
    net, data = module(), batches(classes=CLASSES - 1)
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    masks = all_masks(4)
    per_class = CoalitionUtility(round, evaluator, metric="per_class_accuracy")(masks)
    assert per_class.shape == (16, CLASSES)
    assert per_class[:, -1].eq(0).all()
    balanced = CoalitionUtility(round, evaluator, metric="balanced_accuracy")(masks)
    np.testing.assert_allclose(balanced, per_class[:, :-1].mean(-1))
    expected = [naive_scores(naive_model(net, round, mask, "uniform"), data)["balanced_accuracy"] for mask in masks]
    np.testing.assert_allclose(balanced, expected)


# ---- the table


def test_metrics_of_a_round_share_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    evaluated: list[int] = []
    original = evaluator.evaluate
    monkeypatch.setattr(evaluator, "evaluate", lambda build, count: evaluated.append(count) or original(build, count))
    games = CoalitionGames(evaluator)
    games.begin(round)
    accuracy, loss = games.utility("accuracy"), games.utility("negative_loss")
    twice = torch.tensor([[True, True, False, False], [True, True, False, False], [False, False, False, False]])
    first = accuracy(twice)
    assert first[0] == first[1]
    assert evaluated == [2]
    everything = loss(all_masks(4))
    assert evaluated == [2, 14]
    assert torch.equal(accuracy(all_masks(4))[[12, 12, 0]], first)
    assert loss(twice).equal(everything[[12, 12, 0]])
    assert evaluated == [2, 14]
    assert accuracy.evaluations == loss.evaluations == games.evaluations == 16

    # Other weightings are other models, apart from the empty coalition's.
    games.utility("accuracy", "samples")(all_masks(4))
    assert evaluated == [2, 14, 15]
    games.utility("accuracy", FIXED)(all_masks(4))
    games.utility("negative_loss", FIXED.double())(all_masks(4))
    games.utility("accuracy", FIXED.clone())(all_masks(4))
    assert evaluated[:4] == [2, 14, 15, 15]
    games.begin(a_round(net))
    assert games.evaluations == 0
    games.utility()(twice)
    assert evaluated[-1] == 2
    games.end()
    with pytest.raises(RuntimeError, match="begin"):
        games.utility()


def test_the_table_is_unharmed_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    utility = CoalitionUtility(round, evaluator)
    expected = CoalitionUtility(round, evaluator)(all_masks(4))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            utility(all_masks(4))
    assert utility.evaluations == 0
    assert torch.equal(utility(all_masks(4)), expected)


def test_two_hundred_clients() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    round = a_round(net, clients=200)
    data = batches()
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    masks = torch.rand(30, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    # Coalitions that differ in one client only, wherever its bit lies.
    masks = torch.cat([masks, masks[:1].repeat(4, 1), torch.ones(1, 200, dtype=torch.bool)])
    for row, client in enumerate([0, 63, 64, 199]):
        masks[30 + row, client] ^= True
    utility = CoalitionUtility(round, evaluator, metric="negative_loss", weighting="samples")
    values = utility(masks)
    assert utility.evaluations == 35
    assert len(values.unique()) == 35
    for row in (0, 31, 34):
        expected = naive_scores(naive_model(net, round, masks[row], "samples"), data)["negative_loss"]
        assert values[row].item() == pytest.approx(expected, abs=1e-5)


def test_the_empty_coalition() -> None:
    net = module()
    round, data = a_round(net), batches()
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    now = naive_scores(net.eval(), data)
    assert CoalitionUtility(round, evaluator)(nobody).item() == pytest.approx(now["accuracy"])
    given = CoalitionUtility(round, evaluator, empty=0.25)
    assert given(nobody).item() == 0.25
    assert given.evaluations == 0
    assert given(all_masks(4))[0].item() == 0.25
    assert given.evaluations == 15
    per_class = CoalitionUtility(round, evaluator, metric="per_class_accuracy", empty=torch.arange(4.0))
    assert per_class(nobody).tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ConfigurationError, match=r"empty.*\[\] for accuracy"):
        CoalitionUtility(round, evaluator, empty=torch.arange(4.0))
    assert CoalitionUtility(round, evaluator)(torch.zeros(0, 4, dtype=torch.bool)).shape == (0,)


# ---- the same bits, however they are evaluated


@pytest.mark.parametrize("clients", [5, 9])
def test_scores_depend_on_the_coalition_alone(clients: int) -> None:
    net, data = module(), batches(150, 16)
    round = a_round(net, clients)
    masks = all_masks(clients)[: 2**clients : 2 ** (clients - 5)]

    def losses(masks: Tensor, threads: int, weighting: Any = "samples") -> Tensor:
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, threads=threads)
        return CoalitionUtility(round, evaluator, metric="negative_loss", weighting=weighting)(masks)

    expected = losses(masks, 1)
    for threads in (2, 3):
        assert torch.equal(losses(masks, threads), expected)
    order = torch.randperm(len(masks), generator=torch.Generator().manual_seed(1))
    assert torch.equal(losses(masks[order], 2), expected[order])
    alone = torch.cat([losses(mask[None], 3) for mask in masks[:6]])  # a model's batches on several threads
    assert torch.equal(alone, expected[:6])
    weights = torch.rand(clients, generator=torch.Generator().manual_seed(2))
    fixed = losses(masks, 1, weights)
    assert torch.equal(losses(masks[order], 3, weights), fixed[order])


def test_vmap_gives_what_one_model_at_a_time_gives() -> None:
    net, data = module(), batches()
    round = a_round(net)
    masks = all_masks(4)
    metric = MulticlassF1Score(CLASSES, average="macro")

    def scores(backend: Any, chunk: int | None = None) -> Any:
        evaluator = ModelEvaluator(
            net, round.space, data, num_classes=CLASSES, metric=metric, backend=backend, chunk=chunk
        )
        table = CoalitionTable(round, evaluator)
        return table.scores(CoalitionUtility(round, evaluator)._models, masks)

    expected = scores("threads")
    for backend, chunk in [("serial", None), ("vmap", None), ("vmap", 1), ("vmap", 5), ("vmap", 100)]:
        found = scores(backend, chunk)
        assert torch.equal(found.correct, expected.correct)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.custom, expected.custom, rtol=1e-6, atol=1e-6)


def test_the_chunk_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(
        net, round.space, batches(), num_classes=CLASSES, backend="vmap", metric=MulticlassF1Score(CLASSES)
    )
    released: list[int] = []

    class Memory(vmapped.DeviceMemory):
        """A device on which a model takes 100 bytes, 1000 bytes are free, and only 3 models fit after all."""

        def free(self) -> int:
            return 1000

        def peak(self) -> int:
            return 200

        def release(self) -> None:
            released.append(1)

    chunks: list[int] = []
    runner = evaluator._vmap = vmapped.VmapRunner(evaluator._replicas[0], None, Memory())
    original = runner._run_chunk

    def run_chunk(build: Any, rows: range, *rest: Any) -> None:
        original(build, rows, *rest)  # what has been written is overwritten
        chunks.append(len(rows))
        if len(rows) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runner, "_run_chunk", run_chunk)
    values = CoalitionUtility(round, evaluator)(all_masks(4))
    custom = CoalitionUtility(round, evaluator, metric="custom")(all_masks(4))
    # 0.7 * 1000 / 100 = 7 models, so 4.
    assert chunks[:9] == [2, 4, 2, 2, 2, 2, 2, 2, 2]
    assert released == [1]
    reference = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, metric=MulticlassF1Score(CLASSES))
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))
    torch.testing.assert_close(custom, CoalitionUtility(round, reference, metric="custom")(all_masks(4)))


def test_the_memory_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"mem_get_info": (50, 999), "memory_reserved": 30, "memory_allocated": 10, "max_memory_allocated": 17}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("reset"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    memory = vmapped.CudaMemory(torch.device("cuda", 0))
    assert memory.free() == 70
    memory.start()
    assert memory.peak() == 7
    memory.release()
    assert called == ["reset", "empty"]


def test_a_model_that_does_not_fit_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, backend="vmap")

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(evaluator._vmap, "_run_chunk", full)
    utility = CoalitionUtility(round, evaluator)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        utility(all_masks(4))


class Branching(nn.Module):
    """Looks at its weights' values, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


def test_a_module_that_vmap_cannot_handle_is_evaluated_one_at_a_time() -> None:
    net, data = Branching(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    with pytest.warns(UserWarning, match="vmap cannot run Branching") as caught:
        values = CoalitionUtility(round, evaluator)(all_masks(4))
    assert len(caught) == 1
    reference = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoalitionUtility(round, evaluator)(all_masks(4))


class Unwilling(MulticlassF1Score):
    """Fails at its first update."""

    def update(self, *args: Any) -> None:
        raise RuntimeError("tensors of two devices")


def test_only_what_vmap_cannot_do_is_held_against_it() -> None:
    """A failing metric is an error, and not the end of vmap for the rest of the run."""
    net, data = module(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap", metric=Unwilling(CLASSES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="two devices"):
            CoalitionUtility(round, evaluator)(all_masks(4))
    assert evaluator.backend == "vmap"


class Failing(Branching):
    """Fails at its second model, in whatever way it is run."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("tensors of two devices")
        return super().forward(x)


def test_a_forward_that_fails_one_by_one_too_is_an_error() -> None:
    net, data = Failing(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    evaluator._replicas[0].module.broken = True  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="two devices"):
            CoalitionUtility(round, evaluator)(all_masks(4))
    assert evaluator.backend == "vmap"


# ---- what is left as it was


@pytest.mark.parametrize("backend", ["threads", "vmap", "serial"])
def test_the_module_and_the_process_are_left_alone(backend: Any) -> None:
    net = module()
    net.train()
    net.norm.eval()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.norm.num_batches_tracked.fill_(17)
    before = copy.deepcopy(net.state_dict())
    tensors = {name: (id(t), t.data_ptr(), t._version) for name, t in net.state_dict(keep_vars=True).items()}
    flags = [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()]
    round = a_round(net)
    metric = MulticlassF1Score(CLASSES)
    torch.set_num_threads(threads := 2)
    rng = torch.get_rng_state()

    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, metric=metric, backend=backend)
    CoalitionUtility(round, evaluator)(all_masks(4))
    evaluator.gradient_products(round.global_vector, round.client_updates, 2)

    after = net.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in after.items()} == tensors
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()] == flags
    assert net.conv.weight.grad.eq(1).all()
    assert metric.update_count == 0
    assert torch.get_num_threads() == threads
    assert in_new_thread(torch.get_num_threads) == threads
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


def in_new_thread(function: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


class Fragile(Branching):
    """Cannot bear large weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.weight.abs().max() > 100:
            raise ArithmeticError("too large")
        return self.layer(x.flatten(1))


def test_an_error_in_a_thread_comes_out_and_leaves_nothing_behind() -> None:
    net = Fragile()
    space = ParameterSpace(net)
    metric = MulticlassF1Score(CLASSES)
    evaluator = ModelEvaluator(net, space, batches(), num_classes=CLASSES, threads=3, metric=metric)
    vectors = space.read(net).repeat(40, 1)
    expected = evaluator(vectors[:1]).value("custom")
    vectors[3] = 1000
    torch.set_num_threads(threads := 2)
    alive = threading.active_count()
    with pytest.raises(ArithmeticError, match="too large"):
        evaluator(vectors)
    assert threading.active_count() == alive
    assert in_new_thread(torch.get_num_threads) == torch.get_num_threads() == threads
    assert torch.equal(evaluator(vectors[4:]).value("custom"), expected.repeat(36))


def test_buffers_outside_the_vector_are_read_from_the_module() -> None:
    net, data = module(), batches()
    round = a_round(net)
    for backend in ("threads", "vmap", "serial"):
        net.scale = torch.tensor(1.0)
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend)
        mask = torch.tensor([[True, False, False, True]])
        before = CoalitionUtility(round, evaluator, metric="negative_loss")(mask)
        net.scale = torch.tensor(3.0)
        after = CoalitionUtility(round, evaluator, metric="negative_loss")(mask).item()
        expected = naive_scores(naive_model(net, round, mask[0], "uniform"), data)["negative_loss"]
        assert after == pytest.approx(expected, abs=1e-5) != before.item()


class Watching(L.Callback):
    """Evaluates models of the module that is being trained."""

    values: Tensor

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.space = ParameterSpace(pl_module)
        x, y = toys.toy_sets()[1].tensors
        self.evaluator = ModelEvaluator(pl_module, self.space, [(x, y)], num_classes=toys.CLASSES, threads=2)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.values = self.evaluator(self.space.read(pl_module).repeat(3, 1)).value("accuracy")


def test_in_the_middle_of_a_fit(tmp_path: Any) -> None:
    def trained(*callbacks: L.Callback) -> L.LightningModule:
        torch.manual_seed(0)
        plain = toys.Plain(toys.network(dropout=0.3))
        data = torch.utils.data.DataLoader(toys.toy_sets()[0], batch_size=16)
        toys.trainer_for(None, tmp_path, rounds=1, callbacks=list(callbacks)).fit(plain, data)
        return plain

    watching = Watching()
    watched = trained(watching)
    assert torch.equal(toys.vector(watched), toys.vector(trained()))
    x, y = toys.toy_sets()[1].tensors
    expected = (watched.eval()(x).argmax(-1) == y).float().mean().item()
    assert watching.values.tolist() == pytest.approx([expected] * 3)


# ---- precision


@pytest.mark.parametrize("backend", ["threads", "vmap", "serial"])
def test_the_context_is_around_the_forward_and_no_other_is(backend: Any) -> None:
    net, data = module(), batches()
    round = a_round(net)
    mask = torch.tensor([[True, False, True, True]])

    def loss(context: Any = None) -> float:
        evaluator = ModelEvaluator(
            net, round.space, data, num_classes=CLASSES, backend=backend, context=context, threads=2
        )
        return CoalitionUtility(round, evaluator, metric="negative_loss")(mask).item()

    model = naive_model(net, round, mask[0], "uniform")
    exact = naive_scores(model, data)["negative_loss"]
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.cat([model(x) for x, _ in data]).float().detach()
    y = torch.cat([y for _, y in data])
    expected = -nn.functional.cross_entropy(half, y).item()
    found = loss(lambda: torch.autocast("cpu", torch.bfloat16))
    assert found == pytest.approx(expected, abs=2e-3)
    assert abs(found - exact) > 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert loss() == pytest.approx(exact, abs=1e-6)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["threads", "vmap"])
def test_a_module_in_half_precision(backend: Any) -> None:
    net = module().to(torch.bfloat16)
    data = [(x.to(torch.bfloat16), y) for x, y in batches()]
    round = a_round(net)
    assert round.global_vector.dtype == torch.float32
    # This context sets the process' default dtype, which threads that come and go could leave behind.
    context = HalfPrecision("bf16-true").forward_context
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend, context=context, threads=3)
    found = CoalitionUtility(round, evaluator, metric="negative_loss")(all_masks(4))
    assert torch.get_default_dtype() == torch.float32
    for row in (0, 5, 15):
        logits = [naive_model(net, round, all_masks(4)[row], "uniform")(x).float() for x, _ in data]
        expected = -nn.functional.cross_entropy(torch.cat(logits), torch.cat([y for _, y in data])).item()
        assert found[row].item() == pytest.approx(expected, abs=2e-2)


def test_the_default_dtype_survives_threads_that_leave_in_any_order() -> None:
    both_in, first_out, entries = threading.Barrier(2), threading.Event(), itertools.count()

    @contextmanager
    def context() -> Any:
        """As Lightning's half precision, with the first thread to enter the first to leave."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        worker = threading.current_thread() is not threading.main_thread()
        first = worker and next(entries) == 0
        if worker:
            both_in.wait(30)
        yield
        if worker and not first:
            first_out.wait(30)
        torch.set_default_dtype(before)
        if first:
            first_out.set()

    net = module()
    space = ParameterSpace(net)
    evaluator = ModelEvaluator(net, space, batches(), num_classes=CLASSES, threads=2, context=context)
    evaluator(space.read(net).repeat(2, 1))
    assert torch.get_default_dtype() == torch.float32


class Counting(Branching):
    """Notes how many threads its operators may use, and on which thread it runs."""

    seen: ClassVar[set[tuple[int, bool]]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        return self.layer(x.flatten(1))


def test_one_intra_op_thread_per_worker() -> None:
    torch.set_num_threads(2)
    net = Counting()
    space = ParameterSpace(net)
    for backend, expected in [("serial", {(2, True)}), ("threads", {(1, False)})]:
        evaluator = ModelEvaluator(net, space, batches(), num_classes=CLASSES, backend=backend)
        Counting.seen.clear()
        evaluator(space.read(net).repeat(9, 1))
        assert Counting.seen == expected


@pytest.mark.parametrize("backend", ["threads", "vmap", "serial"])
def test_a_broken_model_has_no_hits_and_no_finite_loss(backend: Any) -> None:
    net = module()
    space = ParameterSpace(net)
    vectors = space.read(net).repeat(3, 1)
    vectors[1] = torch.nan
    vectors[2, space.head.weight] = torch.inf
    evaluator = ModelEvaluator(
        net, space, batches(), num_classes=CLASSES, backend=backend, metric=MulticlassF1Score(CLASSES)
    )
    scores = evaluator(vectors)
    assert scores.loss.isfinite().tolist() == [True, False, False]
    assert scores.loss[1].isnan()
    assert scores.correct[1].sum() == 0
    assert scores.value("negative_loss").isfinite().tolist() == [True, False, False]


def test_within_inference_mode() -> None:
    net = module()
    round = a_round(net)
    with torch.inference_mode():
        data = [(x.clone(), y.clone()) for x, y in batches()]
        inside = ModelEvaluator(net, round.space, data, num_classes=CLASSES, threads=2)
        values = CoalitionUtility(round, inside)(all_masks(4))
        products = inside.gradient_products(round.global_vector, round.client_updates.clone(), 2)
    outside = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, threads=2)
    assert torch.equal(values, CoalitionUtility(round, outside)(all_masks(4)))
    assert torch.equal(values, CoalitionUtility(round, inside)(all_masks(4)))
    expected = outside.gradient_products(round.global_vector, round.client_updates, 2)
    assert torch.equal(products.hessian, expected.hessian)


# ---- what is asked of the caller


class Pair(nn.Module):
    """Takes a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.layer(torch.stack([x["a"], x["b"]], -1))


@pytest.mark.parametrize("backend", ["threads", "vmap", "serial"])
def test_inputs_may_be_any_collection(backend: Any) -> None:
    net, space = Pair(), ParameterSpace(Pair())
    x = {"a": torch.randn(9), "b": torch.randn(9)}
    y = torch.arange(9) % CLASSES
    scores = ModelEvaluator(net, space, [(x, y)], num_classes=CLASSES, backend=backend)(space.read(net)[None])
    assert scores.value("accuracy").item() == pytest.approx((net(x).argmax(-1) == y).float().mean().item())


@pytest.mark.parametrize("size", [600, 7])
def test_batches_are_cut_or_put_together_and_count_as_before(size: int) -> None:
    net = module()
    space = ParameterSpace(net)
    data = batches(600, size)
    evaluator = ModelEvaluator(net, space, data, num_classes=CLASSES)
    assert [len(y) for _, y in evaluator._batches] == [256, 256, 88]
    scores = evaluator(space.read(net)[None])
    expected = naive_scores(net.eval(), data)
    assert scores.value("accuracy").item() == pytest.approx(expected["accuracy"])
    assert scores.value("negative_loss").item() == pytest.approx(expected["negative_loss"], abs=1e-6)


class Pooled(Net):
    """Takes images of any size, and flattens as many people do."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        maps = nn.functional.adaptive_max_pool2d(self.norm(self.conv(x)), 4)
        self.channels_last = maps.is_contiguous(memory_format=torch.channels_last)
        return self.head(maps.view(-1, 64) if self.view else maps.flatten(1))


@pytest.mark.parametrize("view", [False, True])
def test_channels_last_where_the_module_works_in_it(view: bool) -> None:
    net = Pooled(view)
    space = ParameterSpace(net)
    # Sizes that differ cannot be put together.
    data = [*batches(), (torch.randn(3, 1, 9, 7), torch.arange(3))]
    evaluator = ModelEvaluator(net, space, data, num_classes=CLASSES)
    assert len(evaluator._batches) == len(data)
    scores = evaluator(space.read(net)[None])
    assert evaluator._replicas[0].module.channels_last is not view
    expected = naive_scores(net.eval(), data)
    assert scores.value("accuracy").item() == pytest.approx(expected["accuracy"])
    assert scores.value("negative_loss").item() == pytest.approx(expected["negative_loss"], abs=1e-6)


def test_a_metric_where_less_is_better_is_turned() -> None:
    net, data = module(), batches()
    round = a_round(net)
    metric = MulticlassHingeLoss(CLASSES)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, metric=metric, threads=2)
    value = CoalitionUtility(round, evaluator, metric="custom")(torch.zeros(1, 4, dtype=torch.bool))
    net.eval()
    reference = MulticlassHingeLoss(CLASSES)
    for x, y in data:
        reference.update(net(x), y)
    assert value.item() == pytest.approx(-reference.compute().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 0}, "num_classes=0"),
        ({"threads": 0}, "threads=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"backend": "gpu"}, "backend='gpu'"),
        ({"metric": sk.accuracy_score}, "torchmetrics Metric"),
        ({"batches": []}, "no validation samples"),
        ({"batches": [(torch.zeros(0, 1, 6, 6), torch.zeros(0).long())]}, "no validation samples"),
        ({"batches": [torch.zeros(3)]}, "pair"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3))]}, "integer classes"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3, 1).long())]}, r"\[3, 1\]"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(2).long())]}, "3 inputs and 2 labels"),
        ({"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([4]))]}, r"4 \.\. 4.*0 \.\. 3"),
        ({"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([-100]))]}, "-100"),
        ({"num_classes": 9}, r"expected logits \[1, 9\]"),
    ],
)
def test_wrong_arguments_of_the_evaluator(change: dict[str, Any], message: str) -> None:
    net = module()
    arguments = {"batches": batches(), "num_classes": CLASSES, **change}
    with pytest.raises(ConfigurationError, match=message):
        ModelEvaluator(net, ParameterSpace(net), arguments.pop("batches"), **arguments)


def test_a_module_that_cannot_be_copied() -> None:
    net = module()
    net.cache = (number for number in range(3))
    with pytest.raises(ConfigurationError, match="Net cannot be copied"):
        ModelEvaluator(net, ParameterSpace(net), batches(), num_classes=CLASSES)


@pytest.mark.parametrize("backend", ["threads", "vmap"])
def test_a_metric_of_several_numbers(backend: Any) -> None:
    net = module()
    space = ParameterSpace(net)
    metric = MulticlassF1Score(CLASSES, average=None)
    evaluator = ModelEvaluator(net, space, batches(), num_classes=CLASSES, metric=metric, backend=backend)
    with pytest.raises(ConfigurationError, match=r"MulticlassF1Score gives \[4\]"):
        evaluator(space.read(net)[None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "f1"}, "metric='f1'"),
        ({"metric": "custom"}, "ModelEvaluator"),
        ({"weighting": "equal"}, "weighting='equal'"),
        ({"weighting": torch.ones(3)}, "expected 4 weights"),
        ({"weighting": torch.tensor([1, 1, 1, -0.1])}, "not negative"),
        ({"weighting": torch.tensor([1, 1, 1, torch.nan])}, "finite"),
        ({"weighting": Renormalized(torch.ones(3))}, "expected 4 weights"),
        ({"server_lr": 0.0}, "server_lr=0.0"),
    ],
)
def test_wrong_arguments_of_the_utility(change: dict[str, Any], message: str) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    with pytest.raises(ConfigurationError, match=message):
        CoalitionUtility(round, evaluator, **change)


def test_what_does_not_fit_together() -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    with pytest.raises(ConfigurationError, match="another round"):
        CoalitionUtility(a_round(net), evaluator, table=CoalitionTable(round, evaluator))
    with pytest.raises(ConfigurationError, match="not of the same structure"):
        CoalitionUtility(a_round(nn.Linear(3, 4)), evaluator)
    utility = CoalitionUtility(round, evaluator)
    for wrong in (torch.ones(2, 4), torch.ones(4, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"masks bool \[K, 4\]"):
            utility(wrong)
    with pytest.raises(ValueError, match="expected vectors"):
        evaluator(torch.zeros(3))


def test_coalitions_of_all_rounds_are_counted_once_each() -> None:
    module = nn.Linear(2, 2, bias=False)
    space = ParameterSpace(module)
    games = CoalitionGames(ModelEvaluator(module, space, [(torch.eye(2), torch.tensor([0, 1]))], num_classes=2))
    models = torch.tensor([[1.0, 0, 0, 1], [-3.0, 0, 0, -3]])
    masks = torch.tensor([[False, False], [True, False], [True, True]])
    total = 0
    for index in range(3):
        games.begin(Round(index, torch.arange(2), torch.tensor([9, 1]), torch.zeros(4), models, space))
        games.utility("accuracy")(masks)
        games.utility("negative_loss")(masks[:2])  # known already
        total += 3
        assert games.total_evaluations == total
        if index == 1:
            games.table_of(games.round, "accuracy").scores(CoalitionModels(games.round, "uniform", 1.0), masks)
            total += 3  # a game of its own
            assert games.total_evaluations == total
        games.end()
        assert games.total_evaluations == total


def test_the_gradient_is_that_of_the_model_that_is_asked_about() -> None:
    """Worked out once for a round's start, and anew for any other model, within the same round too."""
    module = nn.Linear(2, 2, bias=False)
    space = ParameterSpace(module)
    x, y = torch.eye(2), torch.tensor([0, 1])
    evaluator = ModelEvaluator(module, space, [(x, y)], num_classes=2)
    games, asked = CoalitionGames(evaluator), []
    whole = evaluator.gradient
    evaluator.gradient = lambda vector, *rest: asked.append(vector) or whole(vector, *rest)  # type: ignore[func-returns-value, method-assign]
    first, second = torch.zeros(4), torch.tensor([1.0, 0, 0, 1])
    games.begin(Round(0, torch.arange(2), torch.tensor([9, 1]), first, torch.stack([first, second]), space))
    for vector in (first, second):
        weight = vector.view(2, 2).clone().requires_grad_()
        nn.functional.cross_entropy(x @ weight.T, y).backward()
        torch.testing.assert_close(games.gradient(vector).float(), weight.grad.flatten())
        games.gradient(vector)
    assert len(asked) == 2
    products = games.gradient_products().gradient
    torch.testing.assert_close(products, torch.stack([first, second]).double() @ whole(first))
