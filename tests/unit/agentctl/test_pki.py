"""agentctl pki: what it writes, prints and ends with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentctl.main import main
from corefleet.identity import Identity
from corefleet.pki import CertificateAuthority
from corefleet.pki.reading import read_certs

DAY_S = 86_400
ME = Identity("agentd", "n1")


def pki(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["pki", *map(str, arguments)], input=stdin)


def done(*arguments: str | Path, stdin: str | None = None) -> Any:
    """Run with --json and return the document."""
    ran = pki(*arguments, "--json", stdin=stdin)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    assert pki("init", tmp_path / "ca").exit_code == 0
    return tmp_path / "ca"


def test_init_says_what_to_do_and_overwrites_nothing(tmp_path: Path) -> None:
    ran = pki("init", tmp_path / "ca")
    assert ran.stdout == f"{tmp_path / 'ca/ca.pem'}\n"
    assert "back up" in ran.stderr
    before = (tmp_path / "ca/ca.pem").read_bytes()
    again = pki("init", tmp_path / "ca")
    assert again.exit_code == 2
    assert "not overwritten" in again.stderr
    assert (tmp_path / "ca/ca.pem").read_bytes() == before


def test_one_host_s_files_have_the_names_that_programs_look_for(ca: Path, tmp_path: Path) -> None:
    ran = pki("issue", ca, "controld", "c1", "--host", "C1.example.org", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    shown = {path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    assert shown == {"ca.pem", "controld.pem", "controld.key"}
    assert ran.stdout.startswith(f"controld/c1: {tmp_path / 'out/controld.pem'}, until 2")
    assert (tmp_path / "out/ca.pem").read_bytes() == (ca / "ca.pem").read_bytes()


def test_a_list_is_issued_once_and_only_what_changed_is_made_anew(ca: Path, tmp_path: Path) -> None:
    fleet, out = tmp_path / "fleet.tsv", tmp_path / "out"
    fleet.write_text("agentd\tn1\tn1.example.org\nagentd\tn2\tn2.example.org\nclient\tweb\n")
    first = done("renew", ca, "--from", fleet, "--out", out)
    assert first["changed"]
    assert [each["reason"] for each in first["issued"]] == ["there was none"] * 3
    assert Path(first["issued"][0]["cert"]) == out / "agentd/n1/agentd.pem"
    again = done("renew", ca, "--from", fleet, "--out", out)
    assert again == {"changed": False, "bundle_changed": False, "issued": [], "unchanged": 3}
    fleet.write_text(fleet.read_text().replace("n2.example.org", "10.0.0.2"))
    (out / "client/web/client.key").unlink()
    third = done("renew", ca, "--from", fleet, "--out", out)
    assert [(each["name"], each["reason"]) for each in third["issued"]] == [
        ("n2", "other names"),
        ("web", "the key does not fit"),
    ]
    assert third["unchanged"] == 1
    all_anew = done("issue", ca, "--from", fleet, "--out", out)
    assert [each["reason"] for each in all_anew["issued"]] == ["asked for"] * 3


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(ca: Path, tmp_path: Path) -> None:
    given = ("renew", ca, "agentd", "n1", "--host", "10.0.0.1", "--out", tmp_path / "out")
    plan = done(*given, "--dry-run")
    assert plan["changed"]
    assert plan["would_issue"] == [
        {"role": "agentd", "name": "n1", "hosts": ["10.0.0.1"], "reason": "there was none"}
    ]
    assert not (tmp_path / "out").exists()
    assert pki("list", ca, "--json").stdout == ""
    done(*given)
    assert not done(*given, "--dry-run")["changed"]
    done("rotate-ca", "begin", ca)
    assert done(*given, "--dry-run")["changed"], "the bundle is another"


def test_a_life_that_is_always_about_to_end_is_refused(ca: Path) -> None:
    """It would be renewed at each run, and never be left alone."""
    ran = pki("renew", ca, "agentd", "n1", "--days", "30")
    assert ran.exit_code == 2
    assert "--renew-before: '30d' is not valid; expected less than the 30 days" in ran.stderr


def test_what_ends_soon_is_renewed(ca: Path, tmp_path: Path) -> None:
    given = (ca, "agentd", "n1", "--out", tmp_path / "out")
    done("issue", *given, "--days", "20")
    assert done("issue", *given, "--renew-before", "19d")["unchanged"] == 1
    assert done("issue", *given, "--renew-before", "21d")["issued"][0]["reason"] == "expires soon"


def test_a_list_may_come_from_stdin(ca: Path, tmp_path: Path) -> None:
    line = '{"role": "etcd", "name": "e1", "hosts": ["127.0.0.1"]}\n'
    made = done("renew", ca, "--from", "-", "--out", tmp_path / "out", stdin=line)
    assert [each["hosts"] for each in made["issued"]] == [["127.0.0.1"]]


def test_keys_made_on_nodes_are_signed_and_installed(ca: Path, tmp_path: Path) -> None:
    node, fetched, out = tmp_path / "node", tmp_path / "fetched", tmp_path / "out"
    who = ("agentd", "n1", "--host", "n1.example.org")
    fleet = "agentd\tn1\tn1.example.org\n"
    asked = done("request", *who, "--dir", node)
    assert (asked["changed"], asked["needed"]) == (True, True)
    assert done("request", *who, "--dir", node)["changed"] is False
    csr = fetched / "agentd/n1/agentd.csr"
    csr.parent.mkdir(parents=True)
    csr.write_bytes(Path(asked["csr"]).read_bytes())
    sign = ("sign", ca, "--from", "-", "--csr", fetched, "--out", out, "--renew-before", "30d")
    assert done(*sign, stdin=fleet)["changed"]
    assert not done(*sign, stdin=fleet)["changed"]
    (node / "ca.pem").write_bytes((out / "ca.pem").read_bytes())
    signed = out / "agentd/n1/agentd.pem"
    assert done("install", "agentd", "--cert", signed, "--dir", node)["changed"]
    assert not done("install", "agentd", "--cert", signed, "--dir", node)["changed"]
    assert done("request", *who, "--dir", node) == {
        "changed": False, "needed": False, "reason": "", "csr": None,
    }  # fmt: skip
    assert pki("show", node).exit_code == 0
    csr.unlink()
    assert done(*sign, stdin=fleet)["unchanged"] == 1, "who needs nothing sends no request"


def test_a_pair_that_was_brought_is_put_in_place_together(ca: Path, tmp_path: Path) -> None:
    node, brought = tmp_path / "node", tmp_path / "brought"
    done("issue", ca, "agentd", "n1", "--out", brought)
    done("issue", ca, "agentd", "n1", "--out", tmp_path / "other")
    node.mkdir()
    (node / "ca.pem").write_bytes((brought / "ca.pem").read_bytes())
    install = ("install", "agentd", "--dir", node, "--cert", brought / "agentd.pem")
    assert pki(*install, "--key", tmp_path / "other/agentd.key").exit_code == 2
    assert pki(*install).exit_code == 2, "no request waits here"
    assert not (node / "agentd.key").exists()
    assert done(*install, "--key", brought / "agentd.key")["changed"]
    assert not done(*install, "--key", brought / "agentd.key")["changed"]
    assert pki("show", node).exit_code == 0


def test_a_holder_that_needs_a_request_and_sent_none_is_named(ca: Path, tmp_path: Path) -> None:
    given = ("sign", ca, "--from", "-", "--csr", tmp_path, "--out", tmp_path / "out")
    ran = pki(*given, stdin="agentd\tn1\n")
    assert ran.exit_code == 2
    assert "--csr: 'agentd/n1' is not valid; expected a request: there was none" in ran.stderr


def test_a_request_for_more_than_was_asked_is_not_signed(ca: Path, tmp_path: Path) -> None:
    done("request", "agentd", "n1", "--host", "n2.example.org", "--dir", tmp_path / "node")
    csr = tmp_path / "node/agentd.csr"
    ran = pki("sign", ca, "agentd", "n1", "--csr", csr, "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert "n2.example.org" in ran.stderr
    assert "for agentd/n1: only n1.agentd.corefleet" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_ca_is_rotated_in_three_passes(ca: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    renew = ("renew", ca, "agentd", "n1", "--out", out)
    done(*renew)
    assert done("rotate-ca", "begin", ca)["changed"]
    assert not done("rotate-ca", "begin", ca)["changed"]
    assert (ca / "ca.pem").read_bytes().count(b"BEGIN CERT") == 2
    begun = done(*renew)
    assert (begun["changed"], begun["bundle_changed"], begun["issued"]) == (True, True, [])
    assert done("rotate-ca", "switch", ca)["left_behind"] == ["agentd/n1"]
    refused = pki("rotate-ca", "finish", ca)
    assert refused.exit_code == 2
    assert "agentd/n1" in refused.stderr
    assert done(*renew)["issued"][0]["reason"] == "signed by another CA"
    assert done("rotate-ca", "finish", ca)["phase"] == "steady"
    assert not done("rotate-ca", "finish", ca)["changed"]
    assert done("rotate-ca", "status", ca)["other"] == ""
    assert (ca / "ca.pem").read_bytes().count(b"BEGIN CERT") == 1
    assert done(*renew)["bundle_changed"]
    assert pki("show", out).exit_code == 0


def test_a_node_asks_anew_once_the_next_ca_signs(ca: Path, tmp_path: Path) -> None:
    node = tmp_path / "node"
    done("issue", ca, "agentd", "n1", "--out", node)
    for step, needed in (("begin", False), ("switch", True)):
        done("rotate-ca", step, ca)
        (node / "ca.pem").write_bytes((ca / "ca.pem").read_bytes())
        assert done("request", "agentd", "n1", "--dir", node)["needed"] == needed


def test_show_finds_what_is_wrong(tmp_path: Path) -> None:
    now = [time.time() - 100 * DAY_S]
    authority = CertificateAuthority.create(tmp_path / "ca", clock=lambda: now[0])
    over = authority.issue(ME, days=90)
    now[0] += 100 * DAY_S
    good, soon = authority.issue(ME), authority.issue(ME, days=20)
    stranger = CertificateAuthority.create(tmp_path / "other").issue(ME)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/ca.pem").write_bytes(authority.bundle_pem)
    expected = {"good": [], "soon": ["expires soon"], "over": ["expired"]}
    for name, issued in (("good", good), ("soon", soon), ("over", over), ("other", stranger)):
        (tmp_path / f"d/{name}.pem").write_bytes(issued.cert_pem)
    (tmp_path / "d/good.key").write_bytes(good.key_pem)
    (tmp_path / "d/good.key").chmod(0o600)
    expected["other"] = ["no CA of ca.pem signed it", "other.key does not fit"]
    (tmp_path / "d/other.key").write_bytes(good.key_pem)
    (tmp_path / "d/other.key").chmod(0o640)
    ran = pki("show", tmp_path / "d", "--json")
    assert ran.exit_code == 1
    shown = {Path(each["file"]).stem: each for each in map(json.loads, ran.stdout.splitlines())}
    assert shown["ca"]["is_ca"]
    for name, problems in expected.items():
        assert sorted(shown[name]["problems"]) == problems, name
        assert shown[name]["who"] == "agentd/n1"
    assert shown["soon"]["days_left"] == 19
    assert pki("show", tmp_path / "d/soon.pem", "--warn-days", "19").exit_code == 0
    (tmp_path / "d/good.key").chmod(0o644)
    ran = pki("show", tmp_path / "d/good.pem")
    assert ran.exit_code == 1
    assert "good.key is readable by others" in ran.stdout


def test_a_ca_near_its_end_is_a_problem_while_there_is_time(tmp_path: Path) -> None:
    """Half a year: its certificates live 90 days, and none outlives it."""
    assert pki("init", tmp_path / "long", "--days", "181").exit_code == 0
    assert pki("show", tmp_path / "long/ca.pem").exit_code == 0
    assert pki("init", tmp_path / "short", "--days", "179").exit_code == 0
    ran = pki("show", tmp_path / "short/ca.pem")
    assert ran.exit_code == 1
    assert "expires soon" in ran.stdout


def test_list_shows_the_newest_of_each_or_all(ca: Path, tmp_path: Path) -> None:
    for name in ("n2", "n1", "n2"):
        done("issue", ca, "agentd", name, "--out", tmp_path / name)
    newest = [json.loads(line) for line in pki("list", ca, "--json").stdout.splitlines()]
    assert [each["name"] for each in newest] == ["n1", "n2"]
    held = read_certs((tmp_path / "n2/agentd.pem").read_bytes(), tmp_path)[0]
    assert newest[1]["serial"] == held.serial
    assert len(pki("list", ca, "--all", "--json").stdout.splitlines()) == 3
    assert "agentd  n1" in pki("list", ca).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue", "CA", "agentd"), "ROLE NAME"),
        (("issue", "CA", "--host", "a"), "ROLE NAME"),
        (("issue", "CA", "agentd", "n1", "--from", "CA/lock"), "no ROLE NAME"),
        (("issue", "CA", "--from", "CA/none"), "--from: '"),
        (("issue", "CA", "agentd", "n.1"), "1 to 63"),
        (("issue", "CA", "agentd", "n1", "--host", "a b"), "an IP address, or a host name"),
        (("issue", "CA", "agentd", "n1", "--days", "0"), "days: 0.0 is not valid; expected more"),
        (("issue", "CA", "agentd", "n1", "--days", "9999"), "the CA ends then"),
        (("issue", "CA", "agentd", "n1", "--group", "no-such-group"), "a group of this machine"),
        (("issue", "CA/none", "agentd", "n1"), "`agentctl pki init` makes one"),
        (("rotate-ca", "switch", "CA"), "`begin` first"),
        (("show", "CA/none"), "a readable file (No such file or directory)"),
        (("show", "CA/lock"), "a PEM file of certificates"),
        (("install", "agentd", "--cert", "CA/none"), "a readable file"),
    ],
)
def test_mistakes_are_told_with_what_would_be_right(
    ca: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = [word.replace("CA", str(ca)) for word in arguments]
    out = ["--out", str(tmp_path / "out")] if arguments[0] == "issue" else []
    ran = pki(*given, *out)
    assert ran.exit_code == 2, ran.output
    assert message in ran.stderr
    assert "Traceback" not in ran.output
    assert not (tmp_path / "out/agentd.pem").exists()


def test_a_list_that_is_no_text_is_refused(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"agentd\tn\xff")
    ran = pki("issue", ca, "--from", tmp_path / "list")
    assert ran.exit_code == 2
    assert "UTF-8 text (byte 8 is not)" in ran.stderr


def test_a_directory_that_cannot_be_written_is_named(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = pki("issue", ca, "agentd", "n1", "--out", tmp_path / "file/out")
    assert ran.exit_code == 1
    assert f"agentctl: {tmp_path / 'file'}" in ran.stderr


def test_no_key_is_printed_or_readable_by_others(ca: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        printed = [
            pki("issue", ca, "agentd", "n1", "--out", tmp_path / "out").output,
            pki("issue", ca, "agentd", "n1", "--out", tmp_path / "out", "--json").output,
            pki("request", "agentd", "n1", "--dir", tmp_path / "node").output,
            pki("show", tmp_path / "out", ca, "--json").output,
            pki("rotate-ca", "begin", ca).output,
        ]
    finally:
        os.umask(before)
    secrets = [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and b"PRIVATE" in file.read_bytes() and not file.is_symlink()
    ]
    assert len(secrets) == 4
    for file in secrets:
        assert file.stat().st_mode & 0o777 == 0o600, file
        body = file.read_text().splitlines()[1]
        assert not any(body in text or "PRIVATE" in text for text in printed)
