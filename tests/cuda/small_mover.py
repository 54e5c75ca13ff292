"""The mover process of a GPU, working in small pieces: blocks lie across the borders of what is page-locked,
and what is short for it is not as short as for a real link.
"""

from __future__ import annotations

import sys

from hpkv_daemon.movers.cuda.device import Limits
from hpkv_daemon.movers.cuda.process import main

if __name__ == "__main__":
    small = Limits(
        extent_bytes=200 << 10,
        staging_bytes=64 << 10,
        short_bytes=1 << 10,
        slice_bytes=256 << 10,
        slice_pieces=64,
        slice_calls=8,
    )
    main(sys.argv[1:], small)
