"""The job's secret: where it may come from, what is derived from it, and that it stays one."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pickle
import traceback
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.wire.secret import MAX_CHARS, MIN_CHARS, Secret, make_secret

TEXT = "correct-horse-battery-staple-0123456789"


def test_a_new_secret_is_long_and_another_each_time() -> None:
    made = {make_secret().reveal() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 43


def test_keys_are_of_the_text_and_of_nothing_else() -> None:
    one, same, other = Secret(TEXT, "a"), Secret(f"  {TEXT}\n", "b"), make_secret()
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    for derive in (
        Secret.coordinator_private_key,
        Secret.agent_private_key,
        Secret.bulk_key,
    ):
        assert derive(one) == derive(same) != derive(other)
        assert len(derive(one)) == 32
    keys = {one.coordinator_private_key(), one.agent_private_key(), one.bulk_key()}
    assert len(keys) == 3


def test_the_derivation_is_hkdf_by_its_steps() -> None:
    extracted = hmac.new(b"everstep secret 1", TEXT.encode(), hashlib.sha256).digest()
    expanded = hmac.new(extracted, b"bulk plane\x01", hashlib.sha256).digest()
    assert Secret(TEXT, "here").bulk_key() == expanded


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 characters; at least 32"),
        (TEXT[: MIN_CHARS - 1], "has 31 characters"),
        (" " * 100, "has 0 characters"),
        ("ab" * 40, "repeats a few characters"),
        (TEXT + "\n" + TEXT, "one line of printable ASCII"),
        (TEXT + "é", "one line of printable ASCII"),
        (TEXT * 100, f"more than {MAX_CHARS}"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="EVERSTEP_SECRET") as caught:
        Secret(text, "EVERSTEP_SECRET")
    assert words in str(caught.value)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_file_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    secret = make_secret()
    secret.write(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert Secret.from_file(tmp_path / "secret") == secret
    with pytest.raises(UserError, match="is there already"):
        make_secret().write(tmp_path / "secret")
    with pytest.raises(UserError, match="can't be made"):
        secret.write(tmp_path / "no" / "secret")
    assert Secret.from_file(tmp_path / "secret") == secret


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666, 0o777])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    make_secret().write(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod 600"):
        Secret.from_file(path)


@pytest.mark.parametrize(("owner", "refused"), [("root", False), ("us", True)])
def test_a_group_may_read_only_what_root_owns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, refused: bool
) -> None:
    path = tmp_path / "secret"
    make_secret().write(path)
    path.chmod(0o640)
    real, uid = os.fstat, 0 if owner == "root" else 1234
    monkeypatch.setattr(os, "geteuid", lambda: 1234)

    def owned(fd: int) -> os.stat_result:
        fields = list(real(fd))
        fields[4] = uid
        return os.stat_result(fields)

    monkeypatch.setattr("everstep.wire.secret.os.fstat", owned)
    if refused:
        with pytest.raises(UserError, match="mode 0640"):
            Secret.from_file(path)
    else:
        Secret.from_file(path)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    make_secret().write(path)
    real = os.fstat

    def owned(fd: int) -> os.stat_result:
        fields = list(real(fd))
        fields[4] = 4321
        return os.stat_result(fields)

    monkeypatch.setattr("everstep.wire.secret.os.fstat", owned)
    with pytest.raises(UserError, match="belongs to user 4321"):
        Secret.from_file(path)


def test_what_is_no_file_is_refused_and_nothing_blocks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read: No such file"):
        Secret.from_file(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a regular file"):
        Secret.from_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="not a regular file"):
        Secret.from_file(tmp_path / "pipe")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 64)
    binary.chmod(0o600)
    with pytest.raises(UserError, match="more than ASCII"):
        Secret.from_file(binary)


def test_a_symbolic_link_is_followed_as_kubernetes_makes_them(tmp_path: Path) -> None:
    secret = make_secret()
    secret.write(tmp_path / "data")
    (tmp_path / "link").symlink_to("data")
    assert Secret.from_file(tmp_path / "link") == secret


def test_it_does_not_show_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(TEXT, "here")
    logging.getLogger("test").warning("%s %r %s", secret, [secret], {"secret": secret})
    assert caplog.text
    assert TEXT not in f"{caplog.text} {secret} {secret!r} {[secret]}"
    with pytest.raises(TypeError, match="not copied by pickle"):
        pickle.dumps(secret)
    file = tmp_path / "secret"
    file.write_bytes(TEXT.encode() + b"\xff")
    file.chmod(0o600)
    with pytest.raises(UserError) as caught:
        Secret.from_file(file)
    assert TEXT not in "".join(traceback.format_exception(caught.value))
