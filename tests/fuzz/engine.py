"""Runs a target under atheris (libFuzzer), or with one input again.

    python -m tests.fuzz.TARGET [FOLDER] [-max_total_time=SECONDS] [-runs=N] ...    options as libFuzzer's
    python -m tests.fuzz.TARGET --replay HEX

Inputs that reach new code are kept in FOLDER (else ``.fuzz/TARGET``), which begins with the target's seeds.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_MAX_INPUT = 600
"""Bytes of one input; enough for some hundred events."""

_INSTRUMENTED = ["hpkv_client", "hpkv_daemon"]


def main(name: str) -> NoReturn:
    """Obey the command line. ``name`` is a module here with ``run(data)`` and ``seeds()``."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--replay"]:
        _target(name).run(bytes.fromhex(arguments[1]))
        sys.exit(0)
    _fuzz(name, arguments)


def _target(name: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.{name}")


def _fuzz(name: str, arguments: list[str]) -> NoReturn:
    import atheris  # type: ignore[import-untyped]

    # What is imported in here tells where it goes; so the target, which imports the product, must not be there yet.
    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = _target(name)

    def once(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            sys.stderr.write(f"\ninput: {data.hex()}\nagain: python -m tests.fuzz.{name} --replay {data.hex()}\n")
            sys.stderr.flush()
            raise

    folders = [argument for argument in arguments if not argument.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    if not folders:
        folders = [f".fuzz/{name}"]
    plant(target, Path(folders[0]))
    atheris.Setup([f"tests.fuzz.{name}", f"-max_len={_MAX_INPUT}", *options, *folders], once)
    atheris.Fuzz()
    sys.exit(0)


def plant(target: ModuleType, folder: Path) -> None:
    """Write the target's seeds into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (folder / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
