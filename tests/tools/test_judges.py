"""tools/studies/judges.py: what liars say, and what honest clients' answers come to."""

import judges
import torch

from flsv.metrics.shadow import coalition_masks


def test_lies_about_coalitions() -> None:
    masks = coalition_masks("all", 3)
    counts = torch.tensor([10, 20, 0])
    hits = (masks.double() @ torch.tensor([0.5, 0.3, 0.2]).double())[:, None] * counts
    answers = {client: torch.cat([counts[None], hits.long()]) for client in range(3)}
    samples = torch.tensor([100, 100, 100])
    torch.testing.assert_close(
        judges.values_of(answers, samples, masks), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), rtol=0, atol=0.02
    )
    for kind, mine in (("itself", masks[:, 2].double()), ("spite", 1 - masks[:, :2].double().mean(1))):
        said = judges.told(kind, 2, answers, masks)
        assert torch.equal(said[0], answers[0])
        torch.testing.assert_close(said[2][1:, :2], (mine[:, None] * counts[:2]).long(), rtol=0, atol=0)
    inflated = judges.told("spite, inflated", 2, answers, masks)[2]
    assert inflated[0].tolist() == [100, 200, 0]
    assert judges.values_of(judges.told("itself", 2, answers, masks), samples, masks)[2] > 0.4


def test_drawn_federations_have_judges_with_wrong_labels() -> None:
    data = judges.given("drawn_1_1")[0].datamodule()
    assert 4 <= data.num_clients <= 6
    assert min(len(data.client_indices(client, "val")) for client in range(data.num_clients)) >= 6
    assert len(torch.cat([y for _, y in data.val_dataloader()])) == 600
