"""The floor of all copies: memcpy in a C loop, one thread, in a process of its own.

    python -m benchmarks.floor ENGINE_FD ENGINE_BYTES POOL_FD POOL_BYTES

Maps the two memories that a mover maps, and reads one job a line from stdin as JSON; the answer is the seconds
that the loop took. The loop is compiled with the system's C compiler; without one numpy copies run by run into
strided views, and the answer to the greeting says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from benchmarks.placement import go_first

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void copy_runs(char *to, const uint64_t *to_at, const char *from, const uint64_t *from_at,
               size_t bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy(to + to_at[i], from + from_at[i], bytes);
}
"""

_MADV_POPULATE_WRITE = 23

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.uint64]


class MemcpyFloor:
    """The parent's side: starts the process. A context manager.

    ``tunables`` is glibc's variable, empty for a memcpy as every program has it.
    """

    def __init__(self, engine_fd: int, engine_bytes: int, pool_fd: int, pool_bytes: int, tunables: str = "") -> None:
        command = [sys.executable, "-m", "benchmarks.floor"]
        command += map(str, (engine_fd, engine_bytes, pool_fd, pool_bytes))
        self._process = subprocess.Popen(
            command,
            env=dict(os.environ, GLIBC_TUNABLES=tunables),
            pass_fds=(engine_fd, pool_fd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loop = str(self._answer())

    def _answer(self) -> float | str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the floor process ended with status {self._process.wait()}")
        answer: float | str = json.loads(line)
        return answer

    def copy(self, store: bool, blocks: Sequence[int], slots: Sequence[int], run: int, runs: int, plane: int) -> float:
        """Seconds to copy engine blocks to pool offsets ``slots`` (``store``) or back.

        Block ``b`` is ``runs`` pieces of ``run`` bytes, ``plane`` bytes apart, from ``b * run`` on; in the pool
        it is contiguous.
        """
        assert self._process.stdin is not None
        job = [store, list(blocks), list(slots), run, runs, plane]
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def __enter__(self) -> MemcpyFloor:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _compiled() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "floor.c"), Path(directory, "floor.so")
        source.write_text(_SOURCE)
        command = [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        loop = ctypes.CDLL(str(library))
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    loop.copy_runs.argtypes = [pointer, pointer, pointer, pointer, size, size]
    loop.copy_runs.restype = None
    return loop


def _memory(fd: int, size: int) -> Bytes:
    mapping = mmap.mmap(fd, size)
    # An older kernel: the first lap maps the pages instead.
    with contextlib.suppress(OSError):
        mapping.madvise(_MADV_POPULATE_WRITE)
    return np.frombuffer(mapping, np.uint8)


def _copy(loop: ctypes.CDLL | None, to: Bytes, to_at: Offsets, source: Bytes, from_at: Offsets, run: int) -> float:
    if loop is None:
        started = time.perf_counter()
        for there, here in zip(to_at.tolist(), from_at.tolist(), strict=True):
            to[there : there + run] = source[here : here + run]
        return time.perf_counter() - started
    arguments = (to.ctypes.data, to_at.ctypes.data, source.ctypes.data, from_at.ctypes.data)
    started = time.perf_counter()
    loop.copy_runs(*arguments, run, len(to_at))
    return time.perf_counter() - started


def _serve(jobs: IO[str], engine: Bytes, pool: Bytes) -> None:
    loop = _compiled()
    print(json.dumps("C memcpy" if loop else "numpy slices"), flush=True)
    for line in jobs:
        store, blocks, slots, run, runs, plane = json.loads(line)
        pieces = np.arange(runs, dtype=np.uint64)
        engine_at = (np.array(blocks, np.uint64)[:, None] * np.uint64(run) + pieces * np.uint64(plane)).ravel()
        pool_at = (np.array(slots, np.uint64)[:, None] + pieces * np.uint64(run)).ravel()
        if store:
            seconds = _copy(loop, pool, pool_at, engine, engine_at, run)
        else:
            seconds = _copy(loop, engine, engine_at, pool, pool_at, run)
        print(json.dumps(seconds), flush=True)


def _main(arguments: list[str]) -> None:
    go_first()
    engine_fd, engine_bytes, pool_fd, pool_bytes = map(int, arguments)
    _serve(sys.stdin, _memory(engine_fd, engine_bytes), _memory(pool_fd, pool_bytes))


if __name__ == "__main__":
    _main(sys.argv[1:])
