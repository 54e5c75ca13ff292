"""From 'dpkg -i' to a hit, an upgrade, and away again; and the same for who installs by pip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_node import GET, PUT, PYTHON, Node

pytestmark = pytest.mark.systemd


def test_installed_it_serves_at_once(installed: Node) -> None:
    installed.serving()
    done = installed.run("hpkvd", "status", "--json", user="engine")
    assert json.loads(done.stdout)["running"] is True
    installed.python(PUT)
    assert installed.python(GET) == "True"
    assert installed.run("systemctl", "is-enabled", "hpkvd.socket", "hpkvd.service").stdout == "enabled\nenabled\n"
    assert installed.journal("--priority=warning") == ""


def test_its_files_are_whole_and_in_their_places(installed: Node) -> None:
    assert installed.run("dpkg", "--verify", "hpkv").stdout == ""
    assert installed.run("systemd-analyze", "verify", "--man=no", "hpkvd.service").stderr == ""
    assert installed.run("bash", "-c", ". /usr/share/bash-completion/completions/hpkvd; complete -p hpkvd").stdout
    origins = json.loads(installed.run("hpkvd", "config", "show", "--json").stdout)["settings"]
    assert origins["config"] == "/etc/hpkv/hpkvd.toml"


def test_its_manual_is_in_order(installed: Node) -> None:
    page = installed.run("zcat", "/usr/share/man/man1/hpkvd.1.gz").stdout
    assert ".SS hpkvd config running" in page
    assert "HPKV_KV_MEM_POOL_SIZE" in page.replace("\\-", "-")


def test_an_upgrade_keeps_the_blocks_and_the_settings(installed: Node, package: Path) -> None:
    before = installed.serving()
    installed.python(PUT)
    settings = installed.machine.root / "etc/hpkv/hpkvd.toml"
    settings.write_text('log_level = "debug"\n')
    installed.install(package)
    installed.serving(not_pid=before)
    assert settings.read_text() == 'log_level = "debug"\n'
    assert installed.python(GET) == "True"


def test_removed_it_leaves_settings_and_purged_nothing(installed: Node) -> None:
    root = installed.machine.root
    installed.run("cp", "-a", "/usr/lib/hpkv", "/opt/hpkv")
    installed.run("dpkg", "--remove", "--no-triggers", "hpkv")
    assert not (root / "usr/bin/hpkvd").exists()
    assert not (root / "run/hpkv/hpkvd.sock").exists()
    assert list((root / "dev/shm/hpkv").iterdir()) == []
    assert (root / "etc/hpkv/hpkvd.toml").exists()
    installed.run("dpkg", "--purge", "--no-triggers", "hpkv")
    assert not (root / "etc/hpkv").exists()
    assert not (root / "dev/shm/hpkv").exists()
    left = installed.run("systemctl", "list-unit-files", "hpkvd*", "--no-legend", check=False).stdout
    assert left == ""


def test_who_installs_by_pip_gets_the_same_service(installed: Node) -> None:
    # The environment of the package, moved to where pip would have made one.
    command = installed.machine.root / "opt/hpkv/bin/hpkvd"
    assert PYTHON in command.read_text()
    command.write_text(command.read_text().replace("/usr/lib/hpkv", "/opt/hpkv"))
    done = installed.run("/opt/hpkv/bin/hpkvd", "install-service", "--now")
    assert "members of group hpkv" in done.stderr
    pid = installed.serving()
    done = installed.run("/opt/hpkv/bin/hpkvd", "status", "--json", user="engine")
    assert json.loads(done.stdout)["pid"] == pid
    for code, said in ((PUT, ""), (GET, "True")):
        assert installed.run("/opt/hpkv/bin/python3", "-c", code, user="engine").stdout.strip() == said
    installed.run("/opt/hpkv/bin/hpkvd", "install-service", "--remove")
    assert installed.property("LoadState") == "not-found"
    assert not (installed.machine.root / "run/hpkv/hpkvd.sock").exists()
