"""The mergeable moving average, against the recursion it stands for."""

import torch

from flsv.functional.over_rounds import momentum_merge, momentum_row, momentum_value


def recursion(rounds: list[dict[int, torch.Tensor]], n: int, width: int, mu: float) -> torch.Tensor:
    value = torch.full((n, width), float("nan"), dtype=torch.float64)
    for seen in rounds:
        for i, now in seen.items():
            value[i] = now if value[i].isnan().all() else mu * value[i] + (1 - mu) * now
    return value


def rows_of(seen: dict[int, torch.Tensor], n: int, width: int, mu: float) -> torch.Tensor:
    rows = torch.zeros(n, 2 * width + 1, dtype=torch.float64)
    for i, now in seen.items():
        rows[i] = momentum_row(now[None], mu)[0]
    return rows


def test_any_grouping_of_the_rounds_gives_the_recursion() -> None:
    torch.manual_seed(0)
    n, width, mu = 5, 3, 0.8
    rounds = [
        {i: torch.randn(width, dtype=torch.float64) for i in torch.randperm(n)[:3].tolist() if i != 4} for _ in range(7)
    ]
    parts = torch.stack([rows_of(seen, n, width, mu) for seen in rounds])
    expected = recursion(rounds, n, width, mu)
    assert expected[4].isnan().all()
    for cut in range(1, 7):
        early, late = momentum_merge(parts[:cut], mu), momentum_merge(parts[cut:], mu)
        merged = momentum_value(momentum_merge(torch.stack([early, late]), mu), mu)
        torch.testing.assert_close(merged, expected, equal_nan=True)
