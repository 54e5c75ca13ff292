"""An engine for the checks on a GPU: ``python -m benchmarks.gpu_peer BYTES``. It answers each line with one of JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def say(what: Any) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


def main(size: int) -> None:
    """Make memory, show it, and do what is asked until nobody asks any more."""
    import torch
    from hpkv_vllm.cuda_export import export

    from hpkv_client.cuda import Driver
    from hpkv_client.errors import HpkvError

    memory = torch.empty(size, dtype=torch.uint8, device="cuda")
    memory.random_(0, 256)
    torch.cuda.synchronize()
    try:
        made = export(Driver(), memory.untyped_storage().data_ptr(), size)
    except HpkvError as problem:
        say([str(problem), {}])
        return
    handle = dataclasses.asdict(made.handle)
    handle["token"] = handle["token"].hex()
    del handle["event"]
    say(["", handle])
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "hand_over":
            assert made.pages is not None
            try:
                say([made.pages.hand_over(Path(words[0])), ""])
            except HpkvError as problem:
                say([False, str(problem)])
        elif verb == "wipe":
            memory.zero_()
            torch.cuda.synchronize()
            say("")
        else:
            start, length = map(int, words)
            say(hashlib.sha256(memory[start : start + length].cpu().numpy()).hexdigest())


if __name__ == "__main__":
    from benchmarks.gpu_link import find_checkout

    find_checkout()
    main(int(sys.argv[1]))
