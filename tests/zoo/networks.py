"""Modules whose networks are strange: one trains another, follows it, shares its memory, or changes while it trains."""

import copy
import itertools

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from helpers.data import CLASSES
from helpers.models import sgd
from zoo.program import Base, Small, entropy
from zoo.tasks import Task

PIXELS = 64
CODE_SIZE = 4
HIDDEN_SIZE = 16


def make_leaky_mlp(*widths):
    layers = []
    for num_inputs, num_outputs in itertools.pairwise(widths):
        layers += [nn.Linear(num_inputs, num_outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """Takes the steps of two optimizers by hand, one of them after every third batch, and normalizes weights by a power
    iteration when they are read, as GANs do."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = make_leaky_mlp(CODE_SIZE, 16, PIXELS)
        self.discriminator = make_leaky_mlp(PIXELS, 16, 1)
        for layer in (0, 2):
            spectral_norm(self.discriminator[layer])

        weight_norm(self.generator[2])

    def loss_of_discriminator(self, images, are_real):
        logits = self.discriminator(images)
        targets = torch.full_like(logits, float(are_real))
        return nn.functional.binary_cross_entropy_with_logits(logits, targets)

    def loss_of_generator(self, codes):
        return self.loss_of_discriminator(self.generator(codes), are_real=True)

    def loss_of_real_and_generated(self, real_images, codes):
        generated_images = self.generator(codes).detach()
        loss_of_real = self.loss_of_discriminator(real_images, are_real=True)
        loss_of_generated = self.loss_of_discriminator(generated_images, are_real=False)
        return (loss_of_real + loss_of_generated) / 2

    def take_step(self, optimizer, name, compute_loss, *arguments):
        self.toggle_optimizer(optimizer)
        loss = compute_loss(*arguments)
        self.log(name, loss)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch, batch_idx):
        real_images = batch[0].flatten(1)
        generator_optimizer, discriminator_optimizer = self.optimizers()
        codes = torch.randn(len(real_images), CODE_SIZE)

        is_third_batch = (batch_idx + 1) % 3 == 0
        if is_third_batch:
            self.take_step(generator_optimizer, "g_loss", self.loss_of_generator, codes)
        self.take_step(
            discriminator_optimizer, "d_loss", self.loss_of_real_and_generated, real_images, codes
        )

    def validation_step(self, batch, batch_idx):
        images = batch[0].flatten(1)
        self.log("val_loss", self.loss_of_discriminator(images, are_real=True))

    def configure_optimizers(self):
        optimizers = []
        for network in (self.generator, self.discriminator):
            optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.999))
            optimizers.append(optimizer)
        return optimizers, []


class BYOL(Task):
    """Trains towards a network that follows it after every batch, by a hook, as self-supervised learning does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Flatten(),
            nn.Linear(PIXELS, HIDDEN_SIZE, bias=False),
            nn.BatchNorm1d(HIDDEN_SIZE),
            nn.ReLU(),
        ]
        self.online = nn.Sequential(*layers, nn.Linear(HIDDEN_SIZE, CODE_SIZE))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(CODE_SIZE, CODE_SIZE)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        follow(self.target, self.online, step=0.1)

    def similarity(self, view, other_view):
        prediction = self.predictor(self.online(view))
        return nn.functional.cosine_similarity(prediction, self.target(other_view)).mean()

    def loss(self, batch):
        (view, other_view), _ = batch
        return -self.similarity(view, other_view) - self.similarity(other_view, view)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.online.parameters(), *self.predictor.parameters()], lr=0.1)


@torch.no_grad()
def follow(network, followed_network, step):
    """Move a network's weights towards those of another one."""
    for weight, followed_weight in zip(network.parameters(), followed_network.parameters()):
        weight.lerp_(followed_weight, step)


class HasTeacherInList(Base):
    """Trains towards a teacher that follows it, and that a list hides from the state_dict, as mean teachers do."""

    def __init__(self):
        super().__init__()
        self.teachers = [copy.deepcopy(self.net)]

    def training_step(self, batch, batch_idx):
        (teacher,) = self.teachers
        x = batch[0]
        targets = teacher(x).softmax(1).detach()
        follow(teacher, self.net, step=0.1)

        loss_of_teacher = entropy(self.net(x), targets)
        return self.loss(batch) + 0.3 * loss_of_teacher


class HasFlatWeights(Base):
    """Has parameters that are views of one tensor, which is clamped as a whole, as fused optimizers lay them out."""

    def __init__(self):
        super().__init__()
        parameters = list(self.net.parameters())
        self.flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.flat, parameters)

    def on_before_zero_grad(self, optimizer):
        self.flat.clamp_(-0.3, 0.3)


class ThawsItsBackbone(Small):
    """Has a backbone that a callback of Lightning's thaws after an epoch, as in transfer learning."""

    def __init__(self):
        super().__init__()
        self.backbone = self.net[:4]
        self.head = self.net[5]
        del self.net

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        return sgd([p for p in self.parameters() if p.requires_grad])

    @staticmethod
    def make_callbacks():
        return [BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1)]


class ChangesItself(Base):
    """Changes its structure in its second step, as progressive growing, pruning and debugging by hooks do."""

    def __init__(self, *changes):
        super().__init__()
        self.changes = changes
        self.num_steps = 0

    def loss(self, batch):
        x, y = batch
        outputs = self.net(x)
        has_added_layer = hasattr(self, "added")
        if has_added_layer:
            outputs = outputs + self.added(outputs)
        return entropy(outputs, y) + self.distance_from_anchor()

    def distance_from_anchor(self):
        """The squared distance of a weight from its values at the change that has kept them in its attribute."""
        weight = self.net[0].weight
        if not hasattr(weight, "anchor"):
            return 0.0
        return (weight - weight.anchor).square().sum()

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        if self.num_steps == 2:
            for change in self.changes:
                change(self)
        return super().training_step(batch, batch_idx)


def freeze(module):
    module.net[0].requires_grad_(False)


def stop_tracking(module):
    module.net[1].eval()


def hook_forward(module):
    module.net[0].register_forward_hook(lambda layer, inputs, output: 1.5 * output)


def hook_gradient(module):
    module.net[3].weight.register_hook(lambda gradient: 0.1 * gradient)


def hook_accumulated_gradient(module):
    def shrink(parameter):
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    module.net[3].weight.register_post_accumulate_grad_hook(shrink)


def set_attribute_of_parameter(module):
    weight = module.net[0].weight
    weight.anchor = weight.detach().clone()


def add_layer(module):
    module.added = nn.Dropout(0.0)


def replace_parameter(module):
    module.net[3].bias = nn.Parameter(torch.ones(CLASSES))


def replace_forward(module):
    layer = module.net[3]
    layer.forward = lambda x: 1.5 * nn.functional.linear(x, layer.weight, layer.bias)


CHANGES = (
    freeze,
    stop_tracking,
    hook_forward,
    hook_gradient,
    hook_accumulated_gradient,
    set_attribute_of_parameter,
    add_layer,
    replace_parameter,
    replace_forward,
)
