"""Screenshots for the documentation: a report's first page, TensorBoard's first tab, and a notebook.

    python tools/screenshots.py docs/images --chromium /usr/bin/chromium

Trains the federation of docs/tutorials/hospitals.md, and lets Chromium look at what comes of it; and at the lesson
quickstart, which the site has run. ``--site`` is a site that was built before, ``--only notebook`` one of the pictures.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from flsv.cli import main as main_of_flsv
from flsv.report import Budget, write_report

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "hospitals.md"
NAMES = ("report", "tensorboard", "notebook")
#: A picture's bytes, at most, and its colors: few are needed for text and charts.
MOST, COLOURS = 150_000, 64
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--force-device-scale-factor=1"),
)


def trained(folder: Path) -> Path:
    """A run of the tutorial's federation, in this folder."""
    for name in ("clinics.py", "federation.yaml"):
        (text,) = re.findall(rf'```\w+ title="{name}"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
        (folder / name).write_text(text, encoding="utf-8")
    os.chdir(folder)
    runpy.run_path("clinics.py")
    if main_of_flsv(["fit", "--config", "federation.yaml", "-q"]):
        raise SystemExit("flsv fit has failed")
    return folder / "runs" / "lightning_logs" / "version_0"


def take(chromium: str, url: str, picture: Path, size: tuple[int, int], wait: float = 0) -> None:
    """Let Chromium look at a page, and save what it sees with few colors.

    Args:
        chromium: the program.
        url: of the page.
        picture: the file.
        size: of the window.
        wait: seconds until the page has drawn itself.
    """
    with tempfile.TemporaryDirectory() as own:
        raw = Path(own, "seen.png")
        waiting = [f"--virtual-time-budget={1000 * wait:.0f}"] if wait else []
        command = [chromium, *QUIET, *waiting, f"--user-data-dir={own}/profile", f"--screenshot={raw}"]
        command += [f"--window-size={size[0]},{size[1]}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
        seen = Image.open(raw).convert("RGB")
        seen.quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)
    if picture.stat().st_size > MOST:
        raise SystemExit(f"{picture} has {picture.stat().st_size} bytes: expected {MOST} at most.")
    print(f"{picture}: {picture.stat().st_size // 1000} kB")


@contextmanager
def tensorboard(runs: Path) -> Iterator[str]:
    """The address of TensorBoard on these runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                if len(urllib.request.urlopen(f"{url}/data/runs", timeout=10).read()) > 5:
                    break
            except OSError:
                pass  # it has not begun to listen
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def built(folder: Path) -> Path:
    """The site, whose notebooks are run."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=PAGE.parents[2], env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def of_a_run(chromium: str, out: Path, names: Sequence[str]) -> None:
    """Pictures of a federation's report and curves."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder))
        if "report" in names:
            page = write_report(run, budget=Budget(10_000.0, currency="EUR"))
            take(chromium, page.as_uri(), out / "report.png", (1000, 1400))
        if "tensorboard" in names:
            with tensorboard(run.parent) as url:
                take(chromium, url, out / "tensorboard.png", (1400, 900), wait=90)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM", "chromium"))
    parser.add_argument("--site", type=Path, help="of mkdocs build; by default it is built")
    parser.add_argument("--only", choices=NAMES, action="append", help="give several; by default all")
    options = parser.parse_args()
    out, names = options.out.resolve(), options.only or NAMES
    if "notebook" in names:
        with tempfile.TemporaryDirectory() as folder:
            page = (options.site or built(Path(folder))) / "notebooks" / "quickstart.html"
            take(options.chromium, page.resolve().as_uri(), out / "notebook.png", (1200, 1400), wait=10)
    if {*names} - {"notebook"}:
        of_a_run(options.chromium, out, names)


if __name__ == "__main__":
    main()
