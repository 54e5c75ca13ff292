"""``hpkvd completion``: what makes a shell complete the command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """What a shell of this name must read to complete ``hpkvd``."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    # The script asks hpkvd itself, so that it never grows old.
    return kind(click.Command("hpkvd"), {}, "hpkvd", "_HPKVD_COMPLETE").source()


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes a SHELL complete hpkvd, as in: source <(hpkvd completion bash)."""
    click.echo(script(shell))
