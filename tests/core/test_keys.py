"""Keys on disk, roles, and what may be said with them."""

from __future__ import annotations

import stat
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.errors import ConfigError, NotAuthorised
from zkv.roles import (
    ROLES,
    Holder,
    check_key,
    check_message,
    check_name,
    check_roles,
    mask,
    unmask,
)
from zkv_net import keys as k
from zkv_net.keys import KeyFolder, new_pair
from zkv_net.sparing import Sparing

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file modes")
A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path):
    made = KeyFolder(tmp_path / "keys")
    made.make("broker", ("broker",))
    return made


# --- own keys ------------------------------------------------------------------------------------


def test_a_pair_is_made_once_and_read_again(tmp_path):
    made = KeyFolder(tmp_path / "deep" / "keys")
    assert not made.exists
    own = made.make("node1", ("server", "worker"))
    assert made.exists
    assert made.own() == own
    assert own.add_command == f"zkv keys add server,worker node1 {own.public}"
    assert own.secret not in repr(own)
    with pytest.raises(ConfigError, match="is there already"):
        made.make("node1", ("worker",))
    assert made.own() == own


@posix
def test_what_is_secret_is_for_its_owner_alone(folder):
    assert stat.S_IMODE((folder.path / k.SECRET).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for mode in (0o640, 0o604, 0o660, 0o644, 0o610):
        (folder.path / k.SECRET).chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod 600 .*{k.SECRET}"):
            folder.own()
    (folder.path / k.SECRET).chmod(0o600)
    assert folder.own().name == "broker"


def test_no_keys_are_named_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(ConfigError, match=r"zkv keys new broker.*--insecure"):
        KeyFolder(tmp_path).own()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not toml [",
        'name = "a"\nroles = ["worker"]\npublic = "xy"\nsecret = "xy"\n',
        f'name = "../a"\nroles = ["worker"]\npublic = "{A}"\nsecret = "{B}"\n',
        f'name = "a"\nroles = ["worker"]\npublic = "{A}"\nsecret = "{B}"\n',
        f'name = 7\nroles = 7\npublic = "{A}"\nsecret = 7\n',
        "x" * 5000,
        "\x00",
    ],
    ids=["empty", "no toml", "no keys", "path", "no pair", "types", "large", "zero"],
)
def test_a_damaged_secret_is_refused(folder, text):
    (folder.path / k.SECRET).write_text(text)
    with pytest.raises(ConfigError, match=k.SECRET):
        folder.own()


def test_the_brokers_key_is_the_one_told_or_the_own_of_a_broker(folder, tmp_path):
    assert folder.broker() == folder.own().public
    other = KeyFolder(tmp_path / "other")
    other.make("node", ("worker",))
    with pytest.raises(ConfigError, match="--broker-key KEY"):
        other.broker()
    other.trust(A.upper() + "\n")
    assert other.broker() == A
    (other.path / k.BROKER).write_text("nonsense")
    with pytest.raises(ConfigError, match="is no public key"):
        other.broker()


def test_without_curve_it_is_said_so(monkeypatch):
    monkeypatch.setattr(k.zmq, "has", lambda what: what != "curve")
    with pytest.raises(ConfigError, match="built without CURVE"):
        new_pair()


def test_the_folder_is_the_named_one_else_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(k.VARIABLE, raising=False)
    assert KeyFolder().path == tmp_path / "zkv" / "keys"
    monkeypatch.setenv(k.VARIABLE, str(tmp_path / "named"))
    assert KeyFolder().path == tmp_path / "named"
    assert KeyFolder(tmp_path / "told").path == tmp_path / "told"


# --- who is let in -------------------------------------------------------------------------------


def holder(key=A, name="node1", roles="worker"):
    return Holder(key, name, check_roles(roles))


def test_keys_are_let_in_and_revoked_by_name_or_digits(folder):
    before = folder.changed()
    folder.add(holder(A, "one", "worker"))
    folder.add(holder(B, "two", "server,worker"))
    assert folder.changed() != before
    assert list(folder.holders()) == [holder(A, "one"), holder(B, "two", "server,worker")]
    folder.add(holder(A, "one", "admin"))
    assert next(folder.holders()).roles == {"admin"}
    with pytest.raises(ConfigError, match="another key has the name 'one'"):
        folder.add(holder("c" * 64, "one"))
    assert folder.revoke("one").key == A
    assert folder.revoke(B).name == "two"
    with pytest.raises(ConfigError, match="there are: none"):
        folder.revoke("two")
    assert list(folder.holders()) == []


def test_there_are_not_more_keys_than_allowed(folder, monkeypatch):
    monkeypatch.setattr(k, "KEYS_MAX", 2)
    for digit in "ab":
        folder.add(holder(digit * 64, digit))
    with pytest.raises(ConfigError, match="2 keys are let in, the most"):
        folder.add(holder("c" * 64, "c"))
    (folder.path / k.AUTHORIZED / ("0" * 64)).write_text('name = "x"\nroles = ["worker"]\n')
    found, wrong = folder.scan()
    assert len(found) == 2
    assert "only the first 2" in wrong[0]


@posix
def test_a_folder_that_others_may_write_to_lets_nobody_in(folder):
    folder.add(holder())
    (folder.path / k.AUTHORIZED).chmod(0o777)
    found, wrong = folder.scan()
    assert found == []
    assert "chmod 700" in wrong[0]
    with pytest.raises(ConfigError, match="others may write there"):
        list(folder.holders())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README", 'name = "a"\nroles = ["worker"]\n'),
        ("c" * 63, 'name = "a"\nroles = ["worker"]\n'),
        ("c" * 64, "nonsense ["),
        ("c" * 64, 'name = "a/b"\nroles = ["worker"]\n'),
        ("c" * 64, 'name = "a"\nroles = ["root"]\n'),
        ("c" * 64, 'name = "a"\nroles = []\n'),
        ("c" * 64, 'name = "a"\nroles = 7\n'),
        ("c" * 64, 'roles = ["worker"]\n'),
        ("c" * 64, "#" * 5000),
    ],
)
def test_a_strange_file_lets_nobody_in_and_keeps_nobody_out(folder, name, text):
    folder.add(holder())
    (folder.path / k.AUTHORIZED / name).write_text(text)
    found, wrong = folder.scan()
    assert found == [holder()]
    assert len(wrong) == 1
    assert str(folder.path / k.AUTHORIZED / name) in wrong[0]


@posix
def test_symbolic_links_are_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").write_text('name = "a"\nroles = ["worker"]\n')
    folder.add(holder())
    (folder.path / k.AUTHORIZED / B).symlink_to(tmp_path / "elsewhere")
    found, wrong = folder.scan()
    assert found == [holder()]
    assert "symbolic link" in wrong[0]
    (folder.path / k.BROKER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=k.BROKER):
        folder.trust(A)


@given(name=st.text(max_size=80))
def test_no_name_is_a_path(name):
    try:
        safe = check_name(name)
    except ValueError:
        pass
    else:
        assert not set(safe) & set("/\\\0 \n%{}$")
        assert len(safe.encode()) <= 64


def test_names_with_meaning_to_a_shell_or_a_path_are_none():
    for name in ("", "a/b", "a\\b", "a b", "a\n", "$x", "{x}", "%s", "é", "a" * 65):
        with pytest.raises(ValueError, match="cannot be the name"):
            check_name(name)
    # A name never becomes a path: files are called by keys. These are only odd.
    assert [check_name(name) for name in ("..", ".", "-a", "A_1.x")] == ["..", ".", "-a", "A_1.x"]


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a" * 63, "g" * 64, "a" * 65, "é" * 64, A + " " + B])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="is no public key"):
        check_key(text)


def test_roles_travel_as_bits():
    for bits in range(1 << len(ROLES)):
        assert mask(unmask(bits)) == bits
    assert unmask(1 << 40 | 1) == {"worker"}
    assert check_roles("server, worker") == {"server", "worker"}
    for wrong in ("", ",", "root", "worker;server"):
        with pytest.raises(ValueError, match="is no role"):
            check_roles(wrong)


HELLO = c.WorkerHello("w", 0, 1, False, "h", 1)
EYE = c.WorkerHello("w", 0, 1, True, "h", 1)
SERVER = c.ServerHello("s", "tcp://h:1", 0, "h", 1, False)
CHANGE = c.Change(1, "lr", "1")
MOVE = c.Rearrange(1, "rebalance")
MAY = {
    "worker": {HELLO, EYE},
    "server": {SERVER},
    "follower": {EYE},
    "admin": {EYE, CHANGE, MOVE},
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("message", [HELLO, EYE, SERVER, CHANGE, MOVE, c.Status(1)])
def test_each_role_may_say_its_own_words(role, message):
    allowed = message in MAY[role] or isinstance(message, c.Status)
    if allowed:
        check_message(holder(roles=role), message, member=False)
    else:
        with pytest.raises(NotAuthorised, match=f"'node1'.*{role}.*zkv keys add"):
            check_message(holder(roles=role), message, member=False)


@pytest.mark.parametrize("role", ["follower", "admin", "server"])
def test_a_member_that_only_reads_says_nothing_that_changes_the_model(role):
    name = c.ContributionId(1, 0, 1)
    reads = [c.Pull(1, []), c.Received(0, 1), c.Leave(), c.Accounts([])]
    writes = [c.Offer(1, [], False), c.Begin(), c.Plain(1, "w"), c.Finish(name, 1, 1.0)]
    for message in reads:
        check_message(holder(roles=role), message, member=True)
    for message in [*writes, c.Withdraw(name, 1), c.UsePool(1, 2, 1, 0, True, 0)]:
        with pytest.raises(NotAuthorised, match="which is a worker's"):
            check_message(holder(roles=role), message, member=True)
        check_message(holder(roles="worker"), message, member=True)


# --- words ---------------------------------------------------------------------------------------


def test_what_others_cause_is_said_sparingly():
    now = [0.0]
    words = Sparing(10.0, clock=lambda: now[0])
    assert [words.may("a"), words.may("a"), words.may("b"), words.may("a")] == [
        True,
        False,
        True,
        False,
    ]
    assert words.more() == " (2 more since the last word)"
    assert words.more() == ""
    now[0] = 10.0
    assert words.may("a")
    assert sum(words.may(n) for n in range(10_000)) <= 256
    assert len(words._said) <= 256
    now[0] = 30.0
    assert words.may("new")
