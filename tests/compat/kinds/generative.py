"""Autoencoders and adversarial networks."""

from __future__ import annotations

import itertools
from typing import Any

import lightning as L
import torch
from compat.kinds.base import Kind, images
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

PIXELS, LATENT = 64, 4


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class VAE(L.LightningModule):
    """Draws its code whenever it is called, in validation, too."""

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.encoder, self.decoder = _mlp(PIXELS, 16), _mlp(LATENT, 16, PIXELS)
        self.mean, self.log_variance = nn.Linear(16, LATENT), nn.Linear(16, LATENT)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x.flatten(1))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
        return self.decoder(code).view_as(x), mean, log_variance

    def _losses(self, x: Tensor) -> dict[str, Tensor]:
        again, mean, log_variance = self(x)
        error = nn.functional.mse_loss(again, x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return {"error": error, "kl": divergence, "loss": error + self.hparams.beta * divergence}

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        losses = self._losses(batch[0])
        self.log_dict({f"train_{name}": value for name, value in losses.items()})
        return losses

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({f"val_{name}": value for name, value in self._losses(batch[0]).items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class GAN(L.LightningModule):
    """Two optimizers by hand, one step each per batch, as in Lightning's basic GAN."""

    def __init__(self, critic_steps: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.discriminator = _mlp(LATENT, 16, PIXELS), _mlp(PIXELS, 16, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def _judged(self, x: Tensor, real: bool) -> Tensor:
        verdict = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].flatten(1)
        for_generator, for_discriminator = self.optimizers()
        z = torch.randn(len(real), LATENT).type_as(real)
        # WGAN's way: the generator trains in every n-th batch.
        if (batch_idx + 1) % self.hparams.critic_steps == 0:
            self.toggle_optimizer(for_generator)
            generator_loss = self._judged(self(z), real=True)
            self.log("g_loss", generator_loss)
            self.manual_backward(generator_loss)
            for_generator.step()
            for_generator.zero_grad()
            self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_discriminator)
        discriminator_loss = (self._judged(real, real=True) + self._judged(self(z).detach(), real=False)) / 2
        self.log("d_loss", discriminator_loss)
        self.manual_backward(discriminator_loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._judged(batch[0].flatten(1), real=True))

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts], []


def sngan() -> GAN:
    """A discriminator whose weights are normalized, the last one's too."""
    module = GAN()
    for place in (0, 2):
        spectral_norm(module.discriminator[place])
    weight_norm(module.generator[2])
    return module


KINDS = {
    "vae": Kind(VAE, lambda: images(labels=False)),
    "spectral-norm-gan": Kind(sngan, images, tolerance=5e-6),
    # 4 and 2 batches, with a step of the generator after every third: the client's own third.
    "wgan": Kind(lambda: GAN(critic_steps=3), images, clients=(3, 2)),
}
