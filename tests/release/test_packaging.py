"""What the package index is told: hatch_build.py and pyproject.toml."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flsv

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_readme_links_on_the_package_index_are_absolute_at_the_version_tag(hook):
    shown = hook.description(README, "https://example.org/flsv", flsv.__version__)
    assert len(targets(shown)) == len(targets(README)) > 20
    assert all(target.startswith("https://") for target in targets(shown))

    paths = [target for target in targets(README) if not target.startswith("http")]
    for path in paths:
        assert (ROOT / path.partition("#")[0]).exists(), path
        kind = "raw" if path.endswith(".png") else "blob"
        assert f"(https://example.org/flsv/{kind}/v{flsv.__version__}/{path})" in shown


def test_readme_without_a_repository_url_has_no_relative_links(hook):
    shown = hook.description(README, None, flsv.__version__)
    relative_targets = [target for target in targets(shown) if not target.startswith("http")]
    words = " ".join(shown.split())

    assert relative_targets == []
    assert "![" not in shown
    assert "Published algorithms are" in words

    # The code is not touched: an index shows what README.md shows.
    code_blocks = re.compile(r"```.*?```", flags=re.DOTALL)
    assert code_blocks.findall(shown) == code_blocks.findall(README)


def test_one_address_gives_all_links_of_the_project(hook):
    metadata = {"urls": {"Repository": "https://example.org/flsv/"}}
    hook.Description(str(ROOT), {}).update(metadata)
    tag = f"https://example.org/flsv/blob/v{flsv.__version__}"

    assert metadata["urls"] == {
        "Repository": "https://example.org/flsv/",
        "Documentation": f"{tag}/docs/index.md",
        "Changelog": f"{tag}/CHANGELOG.md",
        "Issues": "https://example.org/flsv/issues",
    }


@pytest.mark.slow
def test_built_metadata_have_versions_and_links():
    process = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )

    metadata = json.loads(process.stdout)
    classifiers = metadata["classifiers"]

    assert metadata["name"] == "flsv"
    assert metadata["version"] == flsv.__version__
    assert metadata["license"] == "Apache-2.0"
    # A licence's classifier is not permitted beside an SPDX licence.
    assert not [name for name in classifiers if name.startswith("License ::")]
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert metadata["readme"]["text"].startswith("# flsv")

    versions = [name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)]
    lowest = metadata["requires-python"].removeprefix(">=")
    minors = range(int(lowest[2:]), int(versions[-1][2:]) + 1)

    assert versions == [f"3.{minor}" for minor in minors]


def test_constraints_have_all_that_ci_installs():
    """`make constraints` after a new requirement; what has an environment of its own in CI is not among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {*project["dependencies"]}
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in ("flower", "nvflare", "conformance", "libraries"):
            required |= {*requirements}
    names = {canonicalize_name(Requirement(text).name) for text in required} - {"flsv"}

    pinned = set()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, _ = line.partition("==")
            pinned.add(canonicalize_name(name))

    assert names <= pinned
