"""CalibratedOTGradient: shares of samples that are not flagged."""

import torch

from flsv.metrics import CalibratedOTGradient
from flsv.valuation import clients_of, sample_values, server_of


def draw_images(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(samples) % 2


def made(**kwargs: object) -> tuple[CalibratedOTGradient, list]:
    bad = draw_images(100, 1)
    bad[0][::10] += 15
    clients = clients_of([bad, draw_images(80, 2), draw_images(40, 3)])
    metric = CalibratedOTGradient(3, features="pixels", support=30, iterations=5, **kwargs)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    metric.update(torch.tensor([0, 1]), clients[:2], server_of(*draw_images(80, 0)), generator=generator)
    return metric, clients


def test_calibrated_ot_gradient_is_one_minus_the_flagged_share() -> None:
    metric, clients = made()
    shares = [client.ask(sample_values).flagged.float().mean() for client in clients[:2]]
    torch.testing.assert_close(metric.compute()[:2], 1 - torch.stack(shares))
    assert clients[0].ask(sample_values).flagged[::10].all()
    assert shares[0] >= 0.1 > shares[1]
    assert metric.diagnostics()["distance"][0] > metric.diagnostics()["distance"][1]


def test_calibrated_ot_gradient_state_holds_counts_and_no_samples() -> None:
    metric, clients = made()
    assert {name: list(state.shape) for name, state in metric.state_dict().items()} == {
        "distances": [3], "flagged": [3], "rounds": [],
    }  # fmt: skip
    assert "most_harmful" in clients[0].ask(lambda local: local.memory["artifacts"])
    assert clients[2].ask(lambda local: "artifacts" not in local.memory)
    _, clients = made(pictures=0)
    assert clients[0].ask(lambda local: "artifacts" not in local.memory)


def test_rule_positive_flags_samples_with_a_positive_gradient() -> None:
    metric, clients = made(rule="positive", options={"calibration": "client"})
    values = clients[1].ask(sample_values)
    assert torch.equal(values.flagged, values.gradients > 0)
