"""The site is built whole, without a warning, and its search finds first what people look for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

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
    "retraining": "tutorials/hospitals.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make docs`` builds it."""
    pytest.importorskip("mkdocstrings", reason="flsv[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert {"index.html", "reference", "sitemap.xml"} <= {path.name for path in site.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_search_ranks_the_page_that_answers_a_query_first(site: Path) -> None:
    import mkdocs

    lunr = Path(mkdocs.__file__).parent / "contrib/search/templates/search/lunr.js"
    look = ["node", ROOT / "tests/docs/search.js", lunr, site / "search/search_index.json", *WANTED]
    found = json.loads(subprocess.run(look, capture_output=True, text=True, check=True).stdout)
    first = {word: addresses[:1] for word, addresses in zip(WANTED, found)}
    assert not [word for word, page in WANTED.items() if not first[word] or not first[word][0].startswith(page)], first
