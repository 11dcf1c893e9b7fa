"""The site is built whole, without a warning, and its search finds first what people look for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest

ROOT = Path(__file__).parents[2]
#: Word to the page that whoever looks for it wants.
WANTED = {
    "budget": "howto/look.html",
    "payment": "howto/look.html",
    "own metric": "howto/own_metric.html",
    "GPU": "gpu.html",
    "privacy": "trust.html",
    "public API": "reference/api.html",
    "hospital": "tutorials/hospitals.html",
    "cross-silo": "deployment.html",
    "partition": "howto/own_data.html",
    "retraining": "reference/command_line.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="flsv[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_search_finds_first_what_people_look_for(site: Path) -> None:
    import mkdocs

    lunr = Path(mkdocs.__file__).parent / "contrib/search/templates/search/lunr.js"
    command = ["node", ROOT / "tests/docs/search.js", lunr, site / "search/search_index.json", *WANTED]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    first = {word: addresses[:1] for word, addresses in zip(WANTED, found)}
    assert [word for word, page in WANTED.items() if not first[word] or not first[word][0].startswith(page)] == [], (
        first
    )


@pytest.mark.slow
def test_the_site_has_metrics_with_pictures_lessons_and_algorithms(site: Path) -> None:
    for name in docs_site.metrics():
        page = (site / f"reference/metrics/{name}.html").read_text()
        assert f'src="{name}.svg"' in page
        assert "When not to use it" in page
        assert "<math" in page
        assert (site / f"reference/metrics/{name}.svg").stat().st_size > 1000
    for path in docs_site.docs_render.LESSONS:
        assert "data:image/png" in (site / f"notebooks/{path.stem}.html").read_text()
        assert json.loads((site / f"notebooks/{path.stem}.ipynb").read_text())["nbformat"] == 4
