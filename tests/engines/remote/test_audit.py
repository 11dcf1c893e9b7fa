"""A site's audit log: what it was asked and has answered, and what becomes of one that somebody has touched."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_federation import Remotely, shapfed, site
from remote_sites import NAMES

from flsv.cli import main
from flsv.engines.remote import AuditLog, Packet, SitePolicy, verify_audit
from flsv.errors import ConfigurationError


def made_log(folder: Path, key: Path | None = None, lines: int = 4) -> Path:
    log = AuditLog(folder / "audit.jsonl", key)
    for i in range(lines):
        log.add("run 7", Packet("train", {"round": i}, {"start": torch.ones(2)}), Packet("update", {"loss": 0.5}))
    return log.path


def key_pair(folder: Path, name: str = "Boston", kind: str = "ec") -> tuple[Path, Path]:
    pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    makes: dict[str, Callable[[], Any]] = {
        "ec": lambda: ec.generate_private_key(ec.SECP384R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
    }
    key = makes[kind]()
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH))
    return private, public


def test_a_federations_sites_write_what_they_are_asked(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    remote = Remotely(tmp_path / "b", shapfed)
    policy = SitePolicy(questions=[], audit=str(log))
    remote.transport.sites[100] = site(tmp_path / "b", 0, shapfed, policy=policy)
    answered = []

    def kept(address: int, packet: Packet, reply: Packet) -> Packet:
        answered.append(reply)
        return reply

    remote.transport.spoil = kept
    remote.fit(2)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["asked"], each["answered"]) for each in entries] == [
        ("hello", "hello"),
        ("train", "update"),
        ("train", "update"),
    ]
    assert [each.get("round") for each in entries] == [None, "0", "1"]
    assert {each.get("run") for each in entries[1:]} == {json.loads((tmp_path / "b" / "run.json").read_text())["run"]}
    found = verify_audit(log)
    assert (found.entries, found.wrong) == (3, [])


def test_what_a_policy_forbids_is_written_with_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    asked = site(tmp_path, 0, shapfed, policy=SitePolicy(questions=[], audit=str(log)))
    told = {"question": "os:system", "clients": 3, "client": 0, "run": "0123456789abcdef", "round": 1}
    asked.answer(Packet("ask", told), "Flower run 7")
    (entry,) = (json.loads(line) for line in log.read_text().splitlines())
    assert (entry["who"], entry["question"], entry["answered"]) == ("Flower run 7", "os:system", "failed")
    assert "its policy does not let it answer 'os:system'" in entry["error"]


def test_nothing_is_answered_that_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "audit.jsonl"
    asked = site(tmp_path, 0, shapfed, policy=SitePolicy(audit=str(log)))
    log.unlink()
    log.parent.rmdir()
    reply = asked.answer(Packet("hello", {"sites": NAMES}))
    assert (reply.kind, reply.plain["error"]) == ("failed", "site 'Boston': its audit log cannot be written")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="audit log .* cannot be written"):
        site(tmp_path, 0, shapfed, policy=SitePolicy(audit=str(tmp_path / "file" / "audit.jsonl")))


def changed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"round": "1"', b'"round": "9"'), *lines[2:]]


@pytest.mark.parametrize(
    ("touch", "where"),
    [
        (changed, "line 3 does not follow"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 does not follow"),
        (lambda lines: lines[1:], "line 1 does not follow"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 does not follow"),
        (lambda lines: [*lines[:2], b"{}", *lines[2:]], "line 3 is no entry"),
        (lambda lines: [*lines[:2], b"\xff", *lines[2:]], "line 3 is no entry"),
        (lambda lines: [*lines[:2], b"3", *lines[2:]], "line 3 is no entry"),
        (lambda lines: [*lines, lines[-1]], "line 5 does not follow"),
    ],
)
def test_a_line_that_was_touched_is_found(
    tmp_path: Path, touch: Callable[[list[bytes]], list[bytes]], where: str
) -> None:
    log = made_log(tmp_path)
    assert verify_audit(log).wrong == []
    log.write_bytes(b"\n".join([*touch(log.read_bytes().splitlines()), b""]))
    assert verify_audit(log).wrong[0].startswith(where)


def test_the_end_of_a_log_is_known_by_a_hash_that_was_kept(tmp_path: Path) -> None:
    log = made_log(tmp_path)
    head = verify_audit(log).head
    made_log(tmp_path, lines=1)
    assert verify_audit(log, kept=head).wrong == []
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert verify_audit(log).wrong == []
    assert "no line has the hash" in verify_audit(log, kept=head).wrong[0]


@pytest.mark.parametrize("kind", ["ec", "ed25519"])
def test_a_log_written_anew_is_found_by_the_sites_key(tmp_path: Path, kind: str) -> None:
    private, public = key_pair(tmp_path, kind=kind)
    log = made_log(tmp_path, private)
    assert verify_audit(log, public).wrong == []
    _, others = key_pair(tmp_path, "Lyon", kind)
    assert verify_audit(log, others).wrong == [f"line {i} is not signed by this key" for i in range(1, 5)]
    entry = json.loads(log.read_text().splitlines()[-1])
    log.write_text("\n".join([*log.read_text().splitlines()[:-1], json.dumps({**entry, "round": "9"}), ""]))
    assert verify_audit(log).wrong == []  # the last line: nothing follows from it yet
    assert verify_audit(log, public).wrong == ["line 4 is not signed by this key"]
    log.write_bytes(b"")
    assert verify_audit(made_log(tmp_path), public).wrong[0] == "line 1 is not signed by this key"


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="RSAPrivateKey: expected one of ECDSA or Ed25519"):
        AuditLog(tmp_path / "log", key_pair(tmp_path, kind="rsa")[0])
    with pytest.raises(ConfigurationError, match="none cannot be read"):
        AuditLog(tmp_path / "log", tmp_path / "none")
    with pytest.raises(ConfigurationError, match="say where that is"):
        SitePolicy(audit_key="key")
    with pytest.raises(ConfigurationError, match=r"audit=3\): expected the path"):
        SitePolicy(audit=3)  # type: ignore[arg-type]


def test_a_crash_within_a_line_is_named_and_the_chain_goes_on(tmp_path: Path) -> None:
    log = made_log(tmp_path)
    log.write_bytes(log.read_bytes()[:-10])
    assert verify_audit(log).wrong == ["the last line was cut short"]
    made_log(tmp_path, lines=2)
    assert verify_audit(log).wrong == ["line 4 is no entry"]
    assert verify_audit(log).entries == 6


def test_lines_that_are_longer_than_a_block(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log")
    for _ in range(3):
        log.add("a" * 10_000, Packet("hello"), Packet("hello"))
    assert verify_audit(log.path).wrong == []


def _write_some(path: Path) -> None:
    log = AuditLog(path)
    for _ in range(25):
        log.add("one of two", Packet("hello"), Packet("hello"))


def test_two_processes_write_one_log(tmp_path: Path) -> None:
    """Two runs at once, each of whose messages a process of its own answers."""
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_write_some, args=(tmp_path / "log",)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
    found = verify_audit(tmp_path / "log")
    assert (found.entries, found.wrong) == (50, [])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = made_log(tmp_path)
    assert main(["audit", str(log)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 entries.")
    (head,) = re.findall(r"\b[0-9a-f]{64}\b", said)
    assert main(["audit", str(log), "--kept", head, "-q"]) == 0
    assert capsys.readouterr().out == ""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
    assert main(["audit", str(log)]) == 1
    assert "Wrong: line 1 does not follow" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "none")]) == 2
