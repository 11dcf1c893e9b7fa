"""``make cuda``: what goes without a GPU, and that a failing check is one."""

import bench_round
import gpu_report
import pandas as pd
import pytest
from gpu_report import ALLOWED, CHECKS, near

pytestmark = pytest.mark.filterwarnings("ignore")


def write_gpu_report(folder, *titles):
    out = folder / "gpu.csv"
    code = gpu_report.main(["--device", "cpu", "--short", "--out", str(out), "--only", *titles])
    return code, pd.read_csv(out, keep_default_na=False).set_index("what")


@pytest.mark.slow
@pytest.mark.long
def test_gpu_report_passes_all_checks_on_the_cpu(tmp_path, monkeypatch):
    """In two precisions of four, since the CPU is compared with itself, and with rounds of few images."""
    allowed = {name: ALLOWED[name] for name in ("32-true", "bf16-true")}
    monkeypatch.setattr(gpu_report, "ALLOWED", allowed)
    images = bench_round.images
    num_images = 60 * bench_round.CLIENTS
    monkeypatch.setattr(bench_round, "IMAGES", 60)
    monkeypatch.setattr(bench_round, "images", lambda total=num_images: images(total))

    code, results = write_gpu_report(tmp_path, *CHECKS)
    assert code == 0, results
    lightning_alone = "round, images a second: Lightning's Trainer alone, data on the device"
    assert float(results.loc[lightning_alone, "found"]) > 0
    assert float(results.loc["round of 4 LeNets, images a second: vmap", "found"]) > 0
    assert results.loc["transformer: the same seed twice, deterministic", "verdict"] == "ok"
    assert results.loc["two ranks on cpu 0 and 0: weights", "found"] == "0.0e+00"
    assert results.loc["transformer: .item() a batch", "verdict"] == "ok"


def test_gpu_report_with_a_failed_check_ends_with_status_1(tmp_path, monkeypatch):
    def apart(device, short):
        yield near("near", 1e-5, 1e-3)
        yield near("far", 1.0, 1e-3)
        raise RuntimeError("and then\nit ended")

    monkeypatch.setitem(CHECKS, "ranks", apart)
    code, checks = write_gpu_report(tmp_path, "machine", "memory", "ranks")

    assert code == 1
    assert checks.loc["device", "found"] == "cpu: no GPU"
    assert checks["verdict"].iloc[-4:].tolist() == [
        "not run",
        "ok",
        "FAILED",
        "FAILED",
    ]
    assert checks.loc["ranks", "found"] == "RuntimeError: and then"
