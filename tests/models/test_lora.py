"""LoRA in a federation: small transformers and networks, randomly initialized, with peft's layers."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost
from flsv.models.lora import LoRAClient, freeze_a
from flsv.sampling import UniformSampler
from helpers import make_generator, refused
from helpers.fits import fit
from helpers.loops_by_hand import (
    LOCAL_EPOCHS,
    SEED,
    assert_same_state,
    cohorts_by_hand,
    fedavg_by_hand,
    take_steps,
)

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

TOKENS = 12
LENGTH = 6


def make_sentences():
    """The class is what the first token is, by thirds."""
    generator = make_generator()
    tokens = torch.randint(0, TOKENS, (170, LENGTH), generator=generator)
    labels = tokens[:, 0] // 4
    train = TensorDataset(tokens[:130], labels[:130])
    test = TensorDataset(tokens[130:], labels[130:])
    data = FederatedDataModule(
        (train, test),
        SizePartitioner([7, 2, 5, 2, 1]),
        batch_size=16,
        splits=Splits(client_test=0.2),
    )
    data.setup("fit")
    return data


class Transformer(L.LightningModule):
    """A user's own module around a Hugging Face model with peft's adapters."""

    def __init__(self, exact=False):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=TOKENS,
            **sizes,
            max_position_embeddings=LENGTH,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        lora = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=2,
            lora_alpha=4,
            target_modules=["query", "value"],
        )
        classifier = transformers.BertForSequenceClassification(config)
        self.net = peft.get_peft_model(classifier, lora)

        if exact:
            freeze_a(self.net)

    def forward(self, x):
        return self.net(input_ids=x).logits

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def make_loop(**kwargs):
    sampler = UniformSampler(3)
    return FederatedLoop(
        share="trainable",
        sampler=sampler,
        local_epochs=LOCAL_EPOCHS,
        seed=SEED,
        **kwargs,
    )


def train_adapters(model, visit):
    def compute_loss(features, labels):
        return nn.functional.cross_entropy(model(input_ids=features).logits, labels)

    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained_parameters, lr=0.02)
    take_steps(optimizer, compute_loss, visit.batches)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LoRA's A and B are averaged")
@pytest.mark.parametrize("exact", [False, True])
def test_lora_of_a_transformer_sends_only_its_adapters(tmp_path, exact):
    module = Transformer(exact)
    data = make_sentences()
    expected, _ = fedavg_by_hand(
        module.net,
        train_adapters,
        data=make_sentences(),
        cohorts=cohorts_by_hand(rounds=2),
    )
    games = {"cssv": ClassSpecificShapley(), "cost": CommunicationCost()}
    loop = make_loop(metrics=games)
    fit(loop, tmp_path, module, data, rounds=2)

    assert_same_state(module.net, expected)

    trained = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    assert set(loop.space.names) == set(trained)
    sizes = [parameter.numel() for parameter in trained.values()]
    assert loop.space.size == sum(sizes)

    initial_parameters = dict(Transformer(exact).net.named_parameters())
    for name, parameter in module.net.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, initial_parameters[name])

    cost = loop.values["cost"].by_class
    expected_cost = loop.participations * float(loop.space.size)

    assert torch.equal(cost[:, 0].nan_to_num(), expected_cost)
    assert loop.values["cssv"].by_class.shape == (5, 3)


def test_lora_without_matching_layers_is_refused():
    with refused("SoftmaxRegression has no linear layer"):
        LoRAClient(network="softmax", num_classes=3, input_shape=(4,))

    with pytest.raises(ValueError, match=r"Target modules .* not found"):
        LoRAClient(
            network="mlp",
            num_classes=3,
            input_shape=(4,),
            targets=["attention"],
        )

    with refused("Linear has no LoRA layer"):
        freeze_a(nn.Linear(2, 2))


@pytest.mark.parametrize("exact", [True, False])
def test_lora_trains_adapters_and_head_and_starts_as_the_frozen_network(exact):
    options = {
        "network": "mlp",
        "network_args": {"hidden": [8, 8]},
        "input_shape": (4,),
    }
    client = LoRAClient(
        rank=2,
        alpha=3.0,
        exact=exact,
        num_classes=3,
        **options,
    )
    trained = set()
    for name, parameter in client.named_parameters():
        if parameter.requires_grad:
            trained.add(name.removeprefix("network.classifier."))

    kinds = ["B"] if exact else ["A", "B"]
    adapters = set()
    for layer_number in (0, 2):
        for kind in kinds:
            adapters.add(f"{layer_number}.lora_{kind}.default.weight")

    assert trained == adapters | {"4.weight", "4.bias"}

    x = torch.randn(5, 4)
    layer = client.network.classifier[0]
    assert_close(layer(x), layer.base_layer(x))

    torch.nn.init.ones_(layer.lora_B["default"].weight)
    weight_of_a = layer.lora_A["default"].weight
    step = x @ weight_of_a.T @ torch.ones(2, 8)

    expected = layer.base_layer(x) + 3.0 / 2 * step
    assert_close(layer(x), expected)
