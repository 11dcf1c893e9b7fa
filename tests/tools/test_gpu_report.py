"""``make cuda``: what goes without a GPU, the page that it writes, and that a failing check is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_report
import pytest
import torch
from gpu_checks import CHECKS, Place, Row, clients_at_once, near, ran

pytestmark = pytest.mark.filterwarnings("ignore")


def page(folder: Path, *titles: str) -> tuple[int, str]:
    out = folder / "gpu.md"
    code = gpu_report.main(["--device", "cpu", "--short", "--out", str(out), "--only", *titles])
    return code, out.read_text()


def test_a_short_run_without_a_gpu_says_so(tmp_path: Path) -> None:
    code, text = page(tmp_path, "Memory that runs out", "Streams", "Peak memory", "Tests")
    assert code == 0, text
    assert "**No run on a GPU has been made: the machine had none.**" in text
    assert "| 32 models at once, the error is simulated | 8 at once | < 32 | ok |" in text
    assert "not here: no streams" in text
    assert "checks hold, 0 fail, 3 cannot be made there" in text
    assert "| device | cpu: no GPU |" in text


@pytest.mark.slow
def test_the_whole_list_on_the_cpu(tmp_path: Path) -> None:
    code, text = page(tmp_path, *CHECKS, "A round under the profiler")
    assert code == 0, text
    assert "two ranks on the CPU: weights" in text
    assert ".item() a batch | 0.00 | 0 | ok" in text


def test_what_fails_is_said_and_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(place: Place) -> Iterator[Row]:
        yield near("near", 1e-5, 1e-3)
        yield near("far", 1.0, 1e-3)
        raise RuntimeError("and then\nit ended")

    monkeypatch.setitem(gpu_report.CHECKS, "Streams", apart)
    code, text = page(tmp_path, "Streams")
    assert code == 1
    assert "**Failed: far; apart.**" in text
    assert "| near | 1.0e-05 | 1e-03 | ok |" in text
    assert "| apart | RuntimeError: and then |  | FAILED |" in text


def test_differences_are_seen(tmp_path: Path) -> None:
    """Or the checks would check nothing."""
    one, other = (ran(None, "convolution", str(tmp_path), rounds=1, batches=b, measured=False) for b in (2, 3))
    assert one.apart(one) == 0
    assert one.apart(other) > 1e-2


def test_a_convolution_in_bf16_is_not_refused_for_its_rounding() -> None:
    """Entries differ by more than is allowed of one: a share of the way that training has gone is."""
    place = Place("cpu", torch.device("cpu"), lambda: {"accelerator": "cpu", "devices": 1}, True)
    rows = [row for row in clients_at_once(place) if "bf16" in row.what]
    assert [row.verdict for row in rows] == ["ok", "ok"]
