"""Nothing of a report is cut: on a screen of 1400 pixels, a telephone of 400, and a sheet of A4; in a real browser."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flsv.payment import Budget, write_report
from helpers.runs import make_fault_event, make_game, make_run

#: Chromium, by its name or by the variable CHROMIUM.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: Width in pixels, and whether the rules for print hold: 680 is what is left of 210 mm between margins of 15.
LOOKS = {"screen": (1400, False), "telephone": (400, False), "paper": (680, True)}
#: Elements of which something lies outside of the page, or of what scrolls.
SEARCH = """
<pre id=found></pre><script>
onload = event => {
  const found = [];
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const note = (what, each) => found.push([frame.id, what, each.className, each.textContent.slice(0, 60)].join(' '));
    for (const each of page.body.querySelectorAll('*')) {
      const box = each.getBoundingClientRect();
      if (box.right > width + 1 || box.left < -1) note('beyond', each);
      if (each.scrollWidth > each.clientWidth + 1 && each.clientWidth && getComputedStyle(each).overflowX != 'visible')
        note('scrolls', each);
    }
    if (!page.querySelector('section')) note('empty', page.body);
  }
  document.getElementById('found').textContent = JSON.stringify(found);
};
</script>
"""
LONG = (
    "Universitätsklinikum-Hamburg-Eppendorf-und-Umgebung",
    "Hôpital de la Pitié-Salpêtrière, Paris",
    "x",
)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (name one by the variable CHROMIUM)"
)


def run_browser(*arguments: str) -> str:
    """Return what it prints."""
    quiet_options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    )
    command = [str(CHROMIUM), *quiet_options, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout


def make_few(folder: Path) -> Path:
    values = {"sv": [0.4, 0.1, 0.05, -0.2], "loo": [0.1, 0.05, 0.02, -0.1]}
    event = make_fault_event(client=1, times=1, num_rounds=3)
    return make_game(folder, values, events=[event])


@pytest.mark.slow
def test_report_on_screen_phone_and_paper_cuts_off_no_text(tmp_path):
    runs = {
        "few": make_few(tmp_path / "few"),
        "many": make_run(tmp_path / "many", clients=40, classes=30),
        "long": make_run(tmp_path / "long", clients=3, classes=12, names=LONG),
    }
    frames = []
    for name, folder in runs.items():
        budget = Budget(1_234_567.0, "sv" if name == "few" else "cssv", currency="EUR")
        text = re.sub(
            r"<meta http-equiv[^>]*>",
            "",
            write_report(folder, budget=budget).read_text(encoding="utf-8"),
        )
        for look, (width, paper) in LOOKS.items():
            if paper:
                text = text.replace("@media screen", "@media not all").replace(
                    "@media print", "@media all"
                )
            page = html.escape(text, quote=True)
            style = f"width:{width}px;height:4000px;border:0"
            frames.append(f'<iframe id="{name} {look}" srcdoc="{page}" style="{style}"></iframe>')

    looking = tmp_path / "look.html"
    looking.write_text("".join(frames) + SEARCH, encoding="utf-8")
    options = ["--virtual-time-budget=5000", "--dump-dom", "--window-size=1600,4200"]
    document = run_browser(*options, looking.as_uri())
    cut_off = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)

    assert cut_off is not None
    assert json.loads(html.unescape(cut_off[1])) == []
