"""``hpkvd keygen``: the key that the nodes of one cluster share."""

from __future__ import annotations

from pathlib import Path

import click

from hpkv_client.address import write_new_key
from hpkv_daemon.cli.options import as_json
from hpkv_daemon.cli.output import emit


@click.command()
@as_json
@click.argument("file", type=click.Path(path_type=Path))
def keygen(as_json: bool, file: Path) -> None:
    """Make a key for engines that run over several nodes, in a new FILE of mode 0600.

    Copy it to every node and name it by HPKV_KEY_FILE: whoever has it may look up and hold blocks on any of them.
    """
    path = file.absolute()
    key = write_new_key(path)
    emit({"key_file": str(path), "public_key": key.public.decode()}, as_json)
