"""A CUDA device against the CPU in every precision, with deterministic kernels, little memory, and two ranks."""

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.games import ModelEvaluator
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, GradientShapley
from flsv.utilities.errors import NotBatched

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

NUM_CLASSES = 4
NUM_CLIENTS = 3
BATCH_SIZE = 8


class Attention(nn.Module):
    """Attention over an image's rows."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.projections = nn.Linear(16, 48)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        rows = self.embedding(x.squeeze(1))
        queries, keys, values = self.projections(rows).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return self.head((rows + attended).mean(-2))


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, NUM_CLASSES),
    )


def make_module(make_network):
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return ClassifierClient(
        make_network(), num_classes=NUM_CLASSES, input_shape=(1, 8, 8), optimizer=optimizer
    )


def images(count, seed=0):
    centers = torch.randn(NUM_CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(count) % NUM_CLASSES
    return TensorDataset(centers[labels] + noise, labels)


class Fitted(NamedTuple):
    """Weights and values of a fit, on the CPU, and how far the weights have moved."""

    weights: torch.Tensor
    path_length: float
    values: dict[str, torch.Tensor]

    def distance(self, other):
        """The distance of the weights, as a share of the way that training has moved them."""
        return float((self.weights - other.weights).norm()) / self.path_length

    def distance_of_values(self, other):
        return max(
            float((values - other.values[name]).abs().max()) for name, values in self.values.items()
        )


def fit(accelerator, make_network, folder, engine="sequential", devices=1, **options):
    metrics = {
        "cssv": ClassSpecificShapley(),
        "game": CumulativeShapley(performance="negative_loss"),
        "logged": CumulativeShapley(performance="val_loss", mode="min"),
        "slope": GradientShapley(),
    }
    quiet = Reporting(table=False, files=False)
    loop = FederatedLoop(metrics=metrics, seed=5, reporting=quiet, engine=engine)
    clients = {str(client): images(4 * BATCH_SIZE, client) for client in range(NUM_CLIENTS)}
    data = FederatedDataModule(clients=clients, val=images(40, 7), batch_size=BATCH_SIZE)
    module = make_module(make_network)
    space = ParameterSpace(module)
    initial_weights = space.read(module).clone().float()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator=accelerator,
        devices=devices,
        callbacks=[loop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, data)

    weights = space.read(module).cpu().float()
    values = {
        name: values.cpu().float()
        for name, values in loop.contribution_metrics.contributions.items()
        if values is not None
    }
    return Fitted(weights, float((weights - initial_weights).norm()), values)


@contextmanager
def tensor_float_32(is_allowed):
    allowed_before = torch.backends.cudnn.allow_tf32
    precision_before = torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = is_allowed
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    yield
    torch.backends.cudnn.allow_tf32 = allowed_before
    torch.set_float32_matmul_precision(precision_before)


for_each_network = pytest.mark.parametrize("make_network", [convolution, Attention])


@for_each_network
@pytest.mark.parametrize(
    ("precision", "is_tf32", "tolerance"),
    [
        ("32-true", False, 1e-3),
        ("32-true", True, 5e-2),
        ("bf16-mixed", False, 0.2),
        ("bf16-true", False, 0.6),
    ],
)
def test_precision_on_the_device_equals_the_cpu_up_to_rounding(
    tmp_path, make_network, precision, is_tf32, tolerance
):
    with tensor_float_32(is_tf32):
        on_device = fit(DEVICE, make_network, tmp_path, precision=precision)
        on_cpu = fit("cpu", make_network, tmp_path, precision=precision)
        assert on_device.distance(on_cpu) <= tolerance
        assert on_device.distance_of_values(on_cpu) <= tolerance

        if precision == "bf16-true":  # vmap refuses it
            return
        try:
            at_once = fit(DEVICE, make_network, tmp_path, engine="vmap", precision=precision)
        except NotBatched:
            assert make_network is Attention
            assert precision == "bf16-mixed"  # PyTorch cannot batch its softmax
        else:
            assert at_once.distance(on_device) <= tolerance


@for_each_network
def test_same_seed_is_bitwise_the_same_with_deterministic_kernels(
    tmp_path, monkeypatch, make_network
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fits = [fit(DEVICE, make_network, tmp_path, deterministic=True) for _ in range(2)]
    torch.use_deterministic_algorithms(False)

    assert torch.equal(fits[0].weights, fits[1].weights)


def test_models_that_do_not_fit_into_memory_are_halved_with_the_same_losses():
    module = make_module(convolution).cuda().eval()
    space = ParameterSpace(module)
    batches = [tuple(tensor.cuda() for tensor in images(2_000).tensors)]
    vectors = space.read(module) + 0.1 * torch.randn(256, space.size, device="cuda")

    def evaluator(backend, chunk):
        return ModelEvaluator(
            module, space, batches, num_classes=NUM_CLASSES, backend=backend, chunk=chunk
        )

    expected = evaluator("serial", 1)(vectors)
    torch.cuda.reset_peak_memory_stats()
    memory_before = torch.cuda.memory_allocated()
    evaluator("vmap", 8)(vectors[:8])
    memory_of_eight = torch.cuda.max_memory_allocated() - memory_before
    torch.cuda.empty_cache()

    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 2.5 * memory_of_eight
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    all_at_once = evaluator("vmap", len(vectors))
    try:
        scores = all_at_once(vectors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert all_at_once.chunk < len(vectors)
    torch.testing.assert_close(scores.values["loss"], expected.values["loss"], rtol=0, atol=1e-3)


PROGRAM_OF_A_RANK = """
import sys
import torch
from device.test_precisions import convolution, fit
from flsv.engines.ranks import FederatedStrategy

accelerator, second_device, folder = sys.argv[1:]
devices = [torch.device(accelerator, index) for index in (0, int(second_device))]
strategy = FederatedStrategy(parallel_devices=devices)
fitted = fit(accelerator, convolution, folder, strategy=strategy, devices="auto")
if strategy.global_rank == 0:
    torch.save(fitted.weights, f"{folder}/weights.pt")
"""


@pytest.mark.parametrize("second_device", [0, 1])
def test_two_ranks_train_the_weights_of_one_process(tmp_path, second_device):
    if second_device == torch.cuda.device_count():
        pytest.skip("there is one CUDA device")
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM_OF_A_RANK)
    command = [sys.executable, program, DEVICE, str(second_device), tmp_path]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert completed.returncode == 0, completed.stderr[-2000:]
    alone = fit(DEVICE, convolution, tmp_path)
    distance = float((torch.load(tmp_path / "weights.pt") - alone.weights).norm())
    assert distance <= 1e-3 * alone.path_length
