"""The version that a run writes into its files, with the commit of a checkout."""

import re
import runpy
import shutil
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

import flsv
from flsv.__about__ import COMMIT_FILE, code_version, commit_of_code
from flsv.utilities import formats
from flsv.utilities.formats import check_format, package_versions
from helpers import refused

ROOT = Path(__file__).parents[2]
ABOUT = ROOT / "flsv" / "__about__.py"
TAG = f"v{flsv.__version__}"


def test_stored_version_is_that_of_the_code_also_in_a_checkout_that_is_not_installed(monkeypatch):
    installed = metadata.version

    def version_of_others(name):
        if name == "flsv":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(formats, "version", version_of_others)

    assert package_versions()["flsv"] == code_version()
    assert code_version().partition("+")[0] == flsv.__version__


def run_git(root, *command):
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    process = subprocess.run(
        ["git", "-C", str(root), *name, *command], check=True, capture_output=True, text=True
    )
    return process.stdout.strip()


def copy_package(root):
    """Make a package of the version's file alone."""
    folder = root / "flsv"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ABOUT, folder)


def version_of(root):
    """The version as a new process finds it."""
    return runpy.run_path(str(root / "flsv" / "__about__.py"))["code_version"]()


@pytest.fixture
def checkout(tmp_path):
    copy_package(tmp_path)
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", "-A")
    run_git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_version_of_a_checkout_names_its_commit_unless_the_commit_is_a_release(checkout):
    first_commit = run_git(checkout, "rev-parse", "--short=8", "HEAD")
    assert version_of(checkout) == f"{flsv.__version__}+g{first_commit}"

    run_git(checkout, "tag", TAG)
    assert version_of(checkout) == flsv.__version__

    with (checkout / "flsv" / "__about__.py").open("a") as file:
        file.write("# changed\n")
    assert version_of(checkout) == f"{flsv.__version__}+dirty"

    run_git(checkout, "commit", "-qam", "second")
    second_commit = run_git(checkout, "rev-parse", "--short=8", "HEAD")
    assert second_commit != first_commit
    assert version_of(checkout) == f"{flsv.__version__}+g{second_commit}"

    (checkout / "flsv" / "__about__.py").write_text(ABOUT.read_text() + "# changed again\n")
    assert version_of(checkout) == f"{flsv.__version__}+g{second_commit}.dirty"


def test_version_in_another_repository_is_that_of_the_package(checkout, monkeypatch):
    """As in site-packages of an environment in a project's folder, and in a hook of another repository."""
    site_packages = checkout / ".venv" / "site-packages"
    copy_package(site_packages)
    assert version_of(site_packages) == flsv.__version__

    (site_packages / "flsv" / COMMIT_FILE.name).write_text("g1e773190\n")
    assert version_of(site_packages) == f"{flsv.__version__}+g1e773190"

    version = version_of(checkout)
    monkeypatch.setenv("GIT_DIR", str(checkout / "elsewhere"))
    assert version_of(checkout) == version


def test_version_of_a_checkout_that_git_cannot_read_is_no_release(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    assert version_of(checkout) == f"{flsv.__version__}+unknown"


@pytest.mark.parametrize(("stored_format", "advice"), [(2, "read it with"), (9, "install")])
def test_file_of_another_format_is_refused_with_the_commits_of_writer_and_reader(
    stored_format, advice
):
    writer = "3.0.0+g1e773190"
    message = f"by flsv {writer} .* this flsv {code_version()} reads .*: {advice} flsv {writer}"
    with refused(message.replace("+", r"\+")):
        check_format("run.json", stored_format, expected=3, written_by=writer)


@pytest.mark.slow
def test_built_packages_know_the_commit_of_their_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sdist = tmp_path / build_sdist(str(tmp_path))
    with tarfile.open(sdist) as archive:
        # The filter is missing in Python before 3.11.4.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(tmp_path)
    monkeypatch.chdir(sdist.with_name(sdist.name.removesuffix(".tar.gz")))
    wheel = tmp_path / build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    assert version_of(tmp_path / "installed") == code_version()
    assert re.fullmatch(r"|unknown|dirty|g\w{8,}(\.dirty)?", commit_of_code())
