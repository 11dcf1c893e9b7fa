"""Signed pages: one is verified, by the key or by a name, and a changed one is refused."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flsv.cli import main
from helpers.runs import make_game

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None,
    reason="there is no ssh-keygen here",
)


def make_key(path: Path) -> Path:
    subprocess.run(
        [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            "",
            "-f",
            str(path),
        ],
        check=True,
    )
    return path


@pytest.fixture
def signed_page(tmp_path: Path) -> tuple[Path, Path]:
    """A page that was signed, and the key."""
    key = make_key(tmp_path / "key")
    folder = make_game(tmp_path / "run", {"sv": [0.4, 0.1]})

    assert (
        main(
            [
                "report",
                str(folder),
                "--budget",
                "100",
                "--sign",
                str(key),
            ]
        )
        == 0
    )

    return folder / "report.html", key


def test_signed_page_is_verified_by_its_key_and_by_its_signers_name(signed_page, tmp_path, capsys):
    page, key = signed_page
    assert main(["report", "--verify", str(page)]) == 0

    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", f"{key}.pub"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]

    assert fingerprint in capsys.readouterr().out

    signers = tmp_path / "signers"
    signers.write_text(f"anna@example.org {Path(f'{key}.pub').read_text()}")

    assert (
        main(
            [
                "report",
                "--verify",
                str(page),
                "--signers",
                str(signers),
            ]
        )
        == 0
    )
    assert "is the page that anna@example.org signed" in capsys.readouterr().out
    assert (
        main(
            [
                "report",
                "--verify",
                str(page.with_name("shares.csv")),
            ]
        )
        == 0
    )

    other_key = make_key(tmp_path / "other")
    signers.write_text(f"bert@example.org {Path(f'{other_key}.pub').read_text()}")

    assert (
        main(
            [
                "report",
                "--verify",
                str(page),
                "--signers",
                str(signers),
            ]
        )
        == 2
    )
    assert "has the key of it" in capsys.readouterr().err


def test_changed_page_and_one_without_a_signature_are_refused(signed_page, capsys):
    page, _ = signed_page
    page.write_text(page.read_text().replace("80.00", "90.00"))

    assert main(["report", "--verify", str(page)]) == 2
    assert "it is not the file that was signed" in capsys.readouterr().err

    Path(f"{page}.sig").unlink()
    assert main(["report", "--verify", str(page)]) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_new_report_replaces_the_signature_and_a_missing_key_is_named(signed_page, capsys):
    page, key = signed_page
    folder = str(page.parent)

    assert (
        main(
            [
                "report",
                folder,
                "--budget",
                "50",
                "--sign",
                str(key),
            ]
        )
        == 0
    )
    assert main(["report", "--verify", str(page)]) == 0

    capsys.readouterr()
    assert main(["report", folder, "--sign", f"{key}.gone"]) == 2
    assert "ssh-keygen -t ed25519 makes a key" in capsys.readouterr().err
