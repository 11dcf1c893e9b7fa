"""Nothing of a report is cut: on a screen of 1400 pixels, a telephone of 400, and a sheet of A4; in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_runs import at_fault, make_game, make_run

from flsv.report import Budget, write_report

#: Chromium, by its name or by the variable CHROMIUM.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: What is left of 210 mm between margins of 15, at 96 pixels an inch.
A4 = 680
#: Elements of which something lies outside of the page, or of what scrolls; and charts that have lost their captions.
LOOK = """
<iframe id=page srcdoc="{page}" style="width:{width}px;height:4000px;border:0"></iframe>
<pre id=found>waiting</pre><script>
document.getElementById('page').onload = event => {{
  const page = event.target.contentDocument, found = [], width = page.documentElement.clientWidth;
  for (const each of page.body.querySelectorAll('*')) {{
    const box = each.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1) found.push(each.tagName + ' ' + each.textContent.slice(0, 60));
    if (each.scrollWidth > each.clientWidth + 1 && each.clientWidth && getComputedStyle(each).overflowX != 'visible')
      found.push('scrolls: ' + each.className + ' ' + each.textContent.slice(0, 60));
  }}
  for (const each of page.querySelectorAll('svg text')) {{
    const box = each.getBoundingClientRect(), chart = each.closest('svg').getBoundingClientRect();
    if (box.left < chart.left - 2 || box.right > chart.right + 2 || box.bottom > chart.bottom + 2)
      found.push('cut by its chart: ' + each.textContent);
  }}
  document.getElementById('found').textContent = JSON.stringify(found);
}};
</script>
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (name one by the variable CHROMIUM)"
)


def browse(*arguments: str) -> str:
    quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    command = [str(CHROMIUM), *quiet, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def cut(page: Path, width: int, paper: bool, folder: Path) -> list[str]:
    """What is cut at this width; on paper, by the rules for print."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<meta http-equiv[^>]*>", "", text)
    if paper:
        text = text.replace("@media screen", "@media not all").replace("@media print", "@media all")
    looking = folder / "look.html"
    looking.write_text(LOOK.format(page=html.escape(text, quote=True), width=width), encoding="utf-8")
    seen = browse("--virtual-time-budget=5000", "--dump-dom", "--window-size=1600,4200", looking.as_uri())
    said = re.search(r'<pre id="found">(.*?)</pre>', seen, re.DOTALL)
    assert said is not None
    return json.loads(html.unescape(said[1]))


@pytest.fixture(scope="module", params=["few", "many", "long"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "few":
        make_game(folder, {"sv": [0.4, 0.1, 0.05, -0.2], "loo": [0.1, 0.05, 0.02, -0.1]}, events=[at_fault(1, 1, 3)])
    elif request.param == "many":
        make_run(folder, clients=60, classes=30)
    else:
        names = ("Universitätsklinikum-Hamburg-Eppendorf-und-Umgebung", "Hôpital de la Pitié-Salpêtrière, Paris", "x")
        make_run(folder, clients=3, classes=12, names=names)
    return write_report(folder, budget=Budget(1_234_567.0, "sv" if request.param == "few" else "cssv", currency="EUR"))


@pytest.mark.parametrize(("width", "paper"), [(1400, False), (400, False), (A4, True)])
def test_nothing_is_cut(page: Path, width: int, paper: bool, tmp_path: Path) -> None:
    assert cut(page, width, paper, tmp_path) == []


def test_the_first_page_of_four_partners_is_one_sheet(tmp_path: Path) -> None:
    folder = make_game(
        tmp_path / "run", {"sv": [0.4, 0.1, 0.05, -0.2], "loo": [0.1, 0.05, 0.02, -0.1]}, events=[at_fault(1, 1, 3)]
    )
    text = write_report(folder, budget=Budget(10_000.0, "sv")).read_text(encoding="utf-8")
    alone = tmp_path / "front.html"
    alone.write_text(re.sub(r"<aside>.*</aside>", "", text, flags=re.DOTALL), encoding="utf-8")
    browse(f"--print-to-pdf={tmp_path / 'front.pdf'}", "--no-pdf-header-footer", alone.as_uri())
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "front.pdf").read_bytes())) == 1
