"""Builds the Debian package: hpkvd with what it imports in a virtual environment of its own, its service, its manual.

    python deb/build.py [DIRECTORY]      the package's path on stdout; it needs dpkg-deb, pip and Debian's python3

The environment belongs to /usr/bin/python3 of the distribution it is built on. Engines use the connector from their
own environment: it is installed there by pip, in the same version.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
PYTHON = "/usr/bin/python3"
HOME = Path("usr/lib/hpkv")
NAME = "hpkv"

_ASSETS = {
    "systemd/hpkvd.service": "usr/lib/systemd/system/hpkvd.service",
    "systemd/hpkvd.socket": "usr/lib/systemd/system/hpkvd.socket",
    "systemd/sysusers.conf": "usr/lib/sysusers.d/hpkv.conf",
    "systemd/tmpfiles.conf": "usr/lib/tmpfiles.d/hpkv.conf",
    "hpkvd.toml": "etc/hpkv/hpkvd.toml",
}
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/hpkvd",
    "zsh": "usr/share/zsh/vendor-completions/_hpkvd",
    "fish": "usr/share/fish/vendor_completions.d/hpkvd.fish",
}
_COPIED = ("hpkv_client", "hpkv_daemon", "connectors", "pyproject.toml", "README.md", "LICENSE")

_CONTROL = """\
Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: The HPKV authors <root@localhost>
Section: net
Priority: optional
Installed-Size: {kilobytes}
Depends: {python}, libc6, systemd (>= 250), init-system-helpers (>= 1.60)
Description: KV cache of a node for LLM inference
 hpkvd keeps the KV cache of LLM inference outside the engine: a prefix that was
 computed once is reused by every engine on the node, and after every restart.
 The connector for vLLM is installed into vLLM's own environment, by pip.
"""


def run(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; ends the build with its complaint if it fails."""
    # pip complains of the environment it runs in, which is not the one it installs into.
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}error: {' '.join(map(str, command[:4]))} ended with status {done.returncode}")
    return done.stdout.strip()


def build(target: Path) -> Path:
    """The package, made in the directory ``target``."""
    with tempfile.TemporaryDirectory(prefix="hpkv-deb-") as scratch:
        work, root = Path(scratch), Path(scratch, "root")
        root.mkdir(0o755)
        python = Path(PYTHON).resolve()
        site = root / HOME / "lib" / python.name / "site-packages"
        version = _install(work, site, python)
        _environment(root / HOME, python)
        for name, place in _ASSETS.items():
            _write(root / place, (SOURCE / "hpkv_daemon/assets" / name).read_text())
        _documents(root, site)
        _control(root, version, python.name)
        target.mkdir(parents=True, exist_ok=True)
        package = target / f"{NAME}_{version}_{_architecture()}.deb"
        run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z3", "--build", root, package)
    return package


def _architecture() -> str:
    return run("dpkg", "--print-architecture")


def _install(work: Path, site: Path, python: Path) -> str:
    """Put HPKV and all that it needs into ``site``, with byte code; the version."""
    source = work / "source"
    for name in _COPIED:
        if (SOURCE / name).is_dir():
            # Not in place: a build leaves its traces beside the sources.
            shutil.copytree(SOURCE / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(SOURCE / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", work, source)
    (wheel,) = work.glob("hpkv-*.whl")
    release = python.name.removeprefix("python")
    only = ("--python-version", release, "--only-binary=:all:", "--no-compile", "--root-user-action=ignore")
    run(*pip, "install", *only, "--target", site, wheel)
    shutil.rmtree(site / "bin", ignore_errors=True)
    # The service's user cannot write it later. Checked by nobody: dpkg alone changes these files.
    run(python, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", site, "-p", f"/{HOME}", site)
    return wheel.name.split("-")[1]


def _environment(home: Path, python: Path) -> None:
    """What makes ``home`` a virtual environment, and the command in it."""
    (home / "bin").mkdir(parents=True)
    (home / "bin/python3").symlink_to(python)
    _write(home / "pyvenv.cfg", f"home = {python.parent}\ninclude-system-site-packages = false\n")
    _write(
        home / "bin/hpkvd",
        f"#!/{HOME}/bin/python3 -P\nfrom hpkv_daemon.cli import main\n\nif __name__ == '__main__':\n    main()\n",
    )
    (home / "bin/hpkvd").chmod(0o755)
    command = home.parents[1] / "bin/hpkvd"
    command.parent.mkdir(parents=True)
    command.symlink_to("../lib/hpkv/bin/hpkvd")


def _documents(root: Path, site: Path) -> None:
    page = run(sys.executable, "-P", SOURCE / "deb/man_page.py")
    for shell, place in _COMPLETIONS.items():
        _write(root / place, run(sys.executable, "-m", "hpkv_daemon", "completion", shell, cwd=SOURCE) + "\n")
    manual = root / "usr/share/man/man1/hpkvd.1.gz"
    manual.parent.mkdir(parents=True)
    manual.write_bytes(gzip.compress(page.encode() + b"\n", mtime=0))
    # Each library in the environment brings its own terms.
    licenses = sorted(path.relative_to(site) for path in site.glob("*.dist-info/**/*") if "LICENSE" in path.name)
    bundled = "".join(f"/{HOME}/lib/{site.parent.name}/site-packages/{path}\n" for path in licenses)
    text = (SOURCE / "LICENSE").read_text()
    _write(root / "usr/share/doc/hpkv/copyright", f"{text}\nLicenses of the libraries that come with it:\n{bundled}")
    _write(root / "usr/share/doc/hpkv/operations.md", (SOURCE / "docs/operations.md").read_text())


def _control(root: Path, version: str, python: str) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}" for path in files]
    facts = {"name": NAME, "version": version, "architecture": _architecture(), "python": python}
    kilobytes = sum(path.stat().st_size for path in files) // 1024
    control = root / "DEBIAN"
    _write(control / "control", _CONTROL.format(kilobytes=kilobytes, **facts))
    _write(control / "md5sums", "\n".join(sums) + "\n")
    _write(control / "conffiles", "".join(f"/{place}\n" for place in _ASSETS.values() if place.startswith("etc/")))
    for script in ("postinst", "prerm", "postrm"):
        shutil.copy(SOURCE / "deb" / script, control / script)
        (control / script).chmod(0o755)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    os.umask(0o022)
    sys.stdout.write(f"{build(Path(sys.argv[1] if len(sys.argv) > 1 else 'dist').absolute())}\n")
