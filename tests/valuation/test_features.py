"""Features against scikit-learn's, timm's and the network cut by hand."""

import pytest
import timm
import torch
from sklearn.decomposition import PCA as SklearnPCA
from torch import nn
from torch.testing import assert_close

from flsv.valuation import clients_of
from flsv.valuation.features import BATCH_SIZE, PCA, Backbone, Penultimate
from helpers import make_generator, refused

# Backbones


def make_images(
    channels: int = 1,
    side: int = 28,
) -> torch.Tensor:
    seeded = make_generator()
    return torch.randn(3, channels, side, side, generator=seeded)


def test_backbone_features_of_a_timm_network_equal_timms_without_classifier(tmp_path):
    torch.manual_seed(1)
    trained = timm.create_model(
        "resnet10t",
        num_classes=4,
        in_chans=1,
    ).eval()
    weights = trained.state_dict()
    file = tmp_path / "weights.pt"
    torch.save(weights, file)
    options = {"pretrained_cfg_overlay": {"file": str(file), "num_classes": 4}}

    features = Backbone(
        "resnet10t",
        pretrained=True,
        options=options,
    )(make_images(side=32))

    headless = timm.create_model("resnet10t", num_classes=0, in_chans=1).eval()
    for name in ("fc.weight", "fc.bias"):
        del weights[name]

    headless.load_state_dict(weights)
    assert_close(features, headless(make_images(side=32)).detach())


def test_random_weights_follow_from_the_seed_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()

    features = [Backbone("lenet5", seed=seed)(make_images()) for seed in (0, 0, 1)]

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(features[0], features[1])
    assert not torch.equal(features[0], features[2])


def test_backbone_resizes_images():
    features = Backbone("resnet18", image_size=40)(make_images(3, side=16))

    assert features.shape == (3, 512)


# Principal components


def draw_samples(samples: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(
        samples,
        1,
        4,
        5,
        generator=make_generator(seed),
    )
    scales = torch.linspace(0.1, 3, 20).view(1, 1, 4, 5)

    return x * scales + 2


def make_sets(x: torch.Tensor, *sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Clients' samples, of no class."""
    return [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(sizes)]


@pytest.mark.parametrize("by_moments", [False, True])
def test_pca_components_equal_scikit_learns(by_moments):
    pca = PCA(4)
    fitted_on = draw_samples(90)
    transformed = draw_samples(30, seed=1)

    if by_moments:
        pca.fit(None, clients_of(make_sets(fitted_on, 50, 0, 39, 1)))
    else:
        pca.fit(fitted_on, [])

    components = pca(transformed).double()

    reference = SklearnPCA(4, svd_solver="full").fit(fitted_on.flatten(1).double().numpy())
    expected = torch.from_numpy(reference.transform(transformed.flatten(1).double().numpy()))

    assert_close(
        components.abs(),
        expected.abs(),
        atol=1e-4,
        rtol=1e-4,
    )

    # One sign per component.
    mean_sign = (components * expected).sign().mean(0)
    assert_close(mean_sign.abs(), torch.ones(4).double())


@pytest.mark.parametrize("by_moments", [False, True])
def test_pca_fit_ignores_non_finite_rows(by_moments):
    x = draw_samples(60)
    broken = x.clone()
    broken[7, 0, 0, 0] = float("nan")
    is_finite = torch.arange(60) != 7

    pca = PCA(3)
    if by_moments:
        pca.fit(None, clients_of(make_sets(broken, 60)))
    else:
        pca.fit(broken, [])

    clean = PCA(3)
    clean.fit(x[is_finite], [])

    components = pca(broken)
    expected = clean(x)[is_finite]

    assert_close(components[is_finite], expected, atol=1e-3, rtol=1e-3)
    assert components[7].isnan().all()


def test_pca_refuses_no_samples_and_samples_of_another_size():
    with refused("nothing to be fitted on"):
        PCA().fit(None, clients_of(make_sets(draw_samples(0), 0)))

    pca = PCA(2)
    samples = draw_samples(30)
    pca.fit(samples, [])

    numbers_per_sample = samples[0].numel()
    message = f"of {numbers_per_sample} numbers, and got 1"
    with refused(message):
        pca(torch.zeros(3, 1))


# The model's own


def test_penultimate_equals_the_network_without_its_last_layer():
    layers = [nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)]
    module = nn.Sequential(*layers).eval()
    x = torch.randn(BATCH_SIZE + 5, 3, 2, 2)

    by_default = Penultimate()(x, module)
    before_named_layer = Penultimate(head="1")(x, module)

    assert_close(by_default, module[:3](x).detach())
    assert_close(before_named_layer, x.flatten(1))
    assert not module[3]._forward_pre_hooks
    with refused("not a layer"):
        Penultimate(head="nope")(x, module)


def test_penultimate_of_a_head_called_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            x = x.flatten(1)
            return self.head(x) + self.head(x)

    module = Twice()
    with refused("given 8 rows.*4 samples"):
        Penultimate()(torch.randn(4, 3, 2, 2), module)

    assert not module.head._forward_pre_hooks  # taken off whatever happens
