"""The same bits, however many threads evaluate; and what threads leave behind."""

from __future__ import annotations

import copy
import itertools
import threading
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import toys
from games.naive import CLASSES, Branching, a_round, all_masks, batches, module
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.parameters import ParameterSpace


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
