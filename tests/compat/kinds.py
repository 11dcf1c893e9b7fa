"""Modules of the kinds that public projects have: unsupervised, transferred, supervised, carried states, hooks."""

import copy
import itertools

import lightning as L
import torch
from compat.base import Kind, Sets, Small, make_images
from lightning.pytorch.callbacks import BackboneFinetuning, LambdaCallback
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import Dataset

from helpers import make_generator, tasks
from helpers.models import sgd

PIXELS = 64
LATENT = 4  # of a code
WIDTH = 16  # of a hidden layer


def _mlp(*widths):
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """Two optimizers by hand, the generator's in every third batch, and weights that are normalized.

    That of the last layer is computed anew, by a step of a power iteration, when it is read in training.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = _mlp(LATENT, 16, PIXELS)
        self.discriminator = _mlp(PIXELS, 16, 1)
        for layer in (0, 2):
            spectral_norm(self.discriminator[layer])

        weight_norm(self.generator[2])

    def _discriminator_loss(self, x, real):
        verdict = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(
            verdict, torch.full_like(verdict, float(real))
        )

    def _step(self, optimizer, name, loss):
        self.toggle_optimizer(optimizer)
        value = loss()
        self.log(name, value)
        self.manual_backward(value)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        generator_optimizer, discriminator_optimizer = self.optimizers()
        z = torch.randn(len(real), LATENT)

        def generator_loss():
            return self._discriminator_loss(self.generator(z), real=True)

        def discriminator_loss():
            loss_of_real = self._discriminator_loss(real, real=True)
            images = self.generator(z).detach()
            loss_of_images = self._discriminator_loss(images, real=False)
            return (loss_of_real + loss_of_images) / 2

        # Optimizers that take unequal numbers of steps.
        if (batch_idx + 1) % 3 == 0:
            self._step(generator_optimizer, "g_loss", generator_loss)
        self._step(discriminator_optimizer, "d_loss", discriminator_loss)

    def validation_step(self, batch, batch_idx):
        images = batch[0].flatten(1)
        loss = self._discriminator_loss(images, real=True)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        optimizers = []
        for part in (self.generator, self.discriminator):
            optimizer = torch.optim.Adam(
                part.parameters(),
                lr=2e-3,
                betas=(0.5, 0.999),
            )
            optimizers.append(optimizer)
        return optimizers, []


# ---- self-supervised learning from two views of a picture


class TwoViews(Dataset):
    """Views drawn when a sample is read, from the global generator, as torchvision's transforms draw."""

    def __init__(self, samples, seed, fixed=False):
        self.x = torch.randn(samples, 1, 8, 8, generator=make_generator(seed))
        self.fixed = fixed
        self.targets = torch.arange(samples) % 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self._view(self.x[index]), self._view(self.x[index])), self.targets[index]

    def _view(self, x):
        if self.fixed:
            return x + 0.1 * x.flip(-1)
        return x.roll(int(torch.randint(0, 8, ())), -1) + 0.1 * torch.randn_like(x)


def make_views():
    return Sets(TwoViews(44, 0), TwoViews(12, 1, fixed=True))


class BYOL(tasks.Kind):
    """The target network follows the online one after every batch, by a hook."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Flatten(),
            nn.Linear(PIXELS, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
        ]
        self.online = nn.Sequential(*layers, nn.Linear(WIDTH, LATENT))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(LATENT, LATENT)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def loss(self, batch):
        (a, b), _ = batch
        alike = nn.functional.cosine_similarity
        return -sum(
            alike(self.predictor(self.online(x)), self.target(y)).mean()
            for x, y in ((a, b), (b, a))
        )

    def configure_optimizers(self):
        return torch.optim.SGD([*self.online.parameters(), *self.predictor.parameters()], lr=0.1)


# ---- a network of which a part is frozen for a while


class Transferred(Small):
    def __init__(self):
        super().__init__()
        self.backbone = self.net[:4]
        self.head = self.net[5]
        del self.net

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        return sgd([p for p in self.parameters() if p.requires_grad])


class ManualAccumulation(tasks.Regression):
    """The accumulation of Lightning's guide to manual optimization: a step after every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


# ---- modules that use much of what a LightningModule may


class KnowsItsClasses(Sets):
    """A data module with attributes that the module asks for, and with a batch hook of its own."""

    outputs = 3

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 0.5 * x, y


class Hooked(Small):
    """Its layers come in ``configure_model``, its dimensions from the data module, callbacks of its own."""

    def __init__(self, dropout=0.2):
        super().__init__(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        self.save_hyperparameters()
        self.net = None
        self.visits = []

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            num_outputs = self.trainer.datamodule.outputs
            self.net = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 12),
                nn.ReLU(),
                nn.Dropout(self.hparams.dropout),
                nn.Linear(12, num_outputs),
            )

    def configure_callbacks(self):
        return [
            LambdaCallback(
                on_train_epoch_start=lambda trainer, module: module.visits.append("callback")
            )
        ]

    def on_fit_start(self):
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def on_train_epoch_start(self):
        self.visits.append(f"epoch {self.current_epoch}")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.float() * self.scale, y

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.current_epoch)

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **kwargs):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.visits

    def on_load_checkpoint(self, checkpoint):
        self.visits = checkpoint["seen"]


class Fetches(Small):
    """Gets its batches itself."""

    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Odd(Small):
    """An empty parameter, a whole number among the parameters, layers without a gradient, batches that are left out,
    and outputs that are kept for the end of the epoch, which is the round's."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.idle = nn.Linear(3, 3)
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.outputs = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        self.outputs.append(self.loss(batch))
        return self.outputs[-1]

    def on_train_epoch_end(self):
        self.log("train_loss_epoch_mean", torch.stack(self.outputs).detach().mean())
        self.outputs.clear()


class GraphOfPixels(Small):
    """A sparse matrix as an attribute, and one as an unsaved buffer."""

    def __init__(self):
        super().__init__()
        neighbors = (torch.eye(64) + torch.eye(64).roll(1, 0)).to_sparse()
        self.neighbors = neighbors
        self.register_buffer("halves", 0.5 * torch.eye(64).to_sparse(), persistent=False)

    def forward(self, x):
        signal = x.flatten(1).T
        for matrix in (self.neighbors, self.halves):
            signal = torch.sparse.mm(matrix, signal)
        return self.net(signal.T)


def _backbone():
    return [BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1)]


def make_task_kind(kind, **options):
    def make():
        torch.manual_seed(0)
        return kind()

    return Kind(make, kind.data, **options)


KINDS = {
    # 4 and 2 batches, with a step of the generator after every third: the client's own third.
    "wgan-spectral-norm": Kind(GAN, make_images, clients=(3, 2), tolerance=5e-6),
    "byol": Kind(BYOL, make_views),
    "backbone-finetuning": Kind(Transferred, make_images, callbacks=_backbone),
    # 5 and 2 batches: a window of one client's last batch must not end with the next one's first.
    "manual-accumulation": make_task_kind(ManualAccumulation, clients=(5, 2)),
    "vae": make_task_kind(tasks.VAE),
    "several-val-loaders": make_task_kind(tasks.SeveralLoaders, logged="val_loss/dataloader_idx_1"),
    "dictionaries": make_task_kind(tasks.Glue, logged="loss_all"),
    "next-character": make_task_kind(tasks.LanguageModel, logged="val/perplexity"),
    "hooks": Kind(Hooked, lambda: KnowsItsClasses(make_images().train, *make_images().val)),
    "dataloader-iter": Kind(Fetches, make_images),
    "odd-parts": Kind(Odd, make_images),
    "sparse-tensors": Kind(GraphOfPixels, make_images),
}
