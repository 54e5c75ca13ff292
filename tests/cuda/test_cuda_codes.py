"""Every call of the driver that is used, with every error that the driver's documentation names for it.

Each is reported by name; the rank is refused, or the job fails, or the mover ends and with it all that it had; and then
the same works.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hpkv_vllm.cuda_export import ComputeStream, Export, export

from benchmarks.gpu_link import GpuLink
from hpkv_client import cuda as calls
from hpkv_client.errors import HpkvError
from hpkv_client.types import Layer, RankShard, Run
from hpkv_daemon.movers.base import Direction
from hpkv_daemon.movers.cuda import mover
from tests.cuda.gpus import FIRST, FakeCuda
from tests.support import Bytes, is_gone, wait_until

BLOCKS = 2
PLACE = 1 << 20
POOL_BYTES = 64 * PLACE
"""A place of its own for each tour: what is page-locked already needs no call."""


class Outcome(Enum):
    """What becomes of it."""

    REFUSED = "the rank is refused"
    FAILED = "the job fails"
    ENDED = "the mover ends"
    WITHOUT = "it goes without"


class Memory(Enum):
    """What a rank registers, and how its blocks travel."""

    HANDLE = "one allocation, blocks in one piece"
    ROWS = "one allocation, blocks in rows"
    PAGES = "page by page"


class Case(NamedTuple):
    """One call that fails once with each of the codes, while a rank with such memory is attached, stores and loads."""

    call: str
    codes: tuple[int, ...]
    outcome: Outcome
    memory: Memory = Memory.HANDLE
    version: int = 12080


REFUSED, FAILED, ENDED, WITHOUT = Outcome.REFUSED, Outcome.FAILED, Outcome.ENDED, Outcome.WITHOUT

OPENING = [
    Case("cuInit", (1, 100, 101, 803, 804), REFUSED),
    Case("cuDeviceGetCount", (1, 3, 201), REFUSED),
    Case("cuDeviceGet", (1, 3, 101, 201), REFUSED),
    Case("cuDeviceGetUuid", (1, 3, 101), REFUSED),
    Case("cuDeviceGetUuid_v2", (1, 3, 101), REFUSED),
    Case("cuDeviceGetPCIBusId", (1, 3, 101), REFUSED),
    Case("cuDevicePrimaryCtxRetain", (1, 2, 3, 101, 201), REFUSED),
    Case("cuCtxSetCurrent", (3, 201), REFUSED),
    Case("cuStreamCreate", (1, 2, 3, 201), REFUSED),
    Case("cuEventCreate", (1, 2, 3, 201), REFUSED),
    Case("cuGetProcAddress_v2", (801,), REFUSED),
]
"""On a mover that has not opened its GPU yet."""

RUNNING = [
    Case("cuMemHostRegister_v2", (1, 2, 3, 201, 712, 800, 801), FAILED),
    Case("cuMemcpyBatchAsync", (1, 3, 201), FAILED),
    Case("cuMemcpy2DAsync_v2", (1, 3, 201, 400), FAILED, Memory.ROWS),
    Case("cuIpcOpenMemHandle_v2", (1, 201, 205, 400, 711), REFUSED),
    # Of foreign memory a driver need not tell the size.
    Case("cuMemGetAddressRange_v2", (1, 3, 201, 500), WITHOUT),
    Case("cuMemAddressReserve", (1, 2, 3, 800, 801), REFUSED, Memory.PAGES),
    Case("cuMemImportFromShareableHandle", (1, 3, 800, 801), REFUSED, Memory.PAGES),
    Case("cuMemMap", (1, 2, 3, 101, 401, 800, 801), REFUSED, Memory.PAGES),
    Case("cuMemSetAccess", (1, 101, 801), REFUSED, Memory.PAGES),
    # The last: from then on it does without.
    Case("cuMemcpyBatchAsync", (801,), WITHOUT),
]
"""On one mover, one after the other."""

RUNNING_OLD = [
    Case("cuMemcpyAsync", (1, 3, 201, 400), FAILED, version=12040),
    Case("cuMemcpy2DAsync_v2", (1, 400), FAILED, Memory.ROWS, version=12040),
]
"""The same on a driver without batches."""

ENDING = [
    Case("cuInit", (802, 999), ENDED),
    Case("cuDeviceGetCount", (4,), ENDED),
    Case("cuDeviceGet", (4,), ENDED),
    Case("cuDeviceGetUuid", (4,), ENDED),
    Case("cuDeviceGetUuid_v2", (4,), ENDED),
    Case("cuDeviceGetPCIBusId", (4,), ENDED),
    Case("cuDevicePrimaryCtxRetain", (4, 999), ENDED),
    Case("cuCtxSetCurrent", (4,), ENDED),
    Case("cuStreamCreate", (4,), ENDED),
    Case("cuEventCreate", (4,), ENDED),
    Case("cuMemHostRegister_v2", (4,), ENDED),
    Case("cuMemGetAddressRange_v2", (4,), ENDED),
    Case("cuMemcpyBatchAsync", (4, 700), ENDED),
    Case("cuMemcpy2DAsync_v2", (4, 702), ENDED, Memory.ROWS),
    Case("cuMemcpyAsync", (4, 719), ENDED, version=12040),
    # Whether copies before it are done can never be told then.
    Case("cuEventRecord", (1, 3, 4, 201, 400), ENDED),
    Case("cuEventQuery", (1, 4, 214, 400, 700, 714), ENDED),
    Case("cuMemAddressReserve", (4,), ENDED, Memory.PAGES),
    Case("cuMemImportFromShareableHandle", (4,), ENDED, Memory.PAGES),
    Case("cuMemMap", (4,), ENDED, Memory.PAGES),
    # What cannot be undone is undone by the end of the process.
    Case("cuMemRelease", (1, 3, 4, 800, 801), ENDED, Memory.PAGES),
    Case("cuMemUnmap", (1, 3, 4, 800, 801), ENDED, Memory.PAGES),
    Case("cuMemAddressFree", (1, 3, 4, 800, 801), ENDED, Memory.PAGES),
    Case("cuIpcCloseMemHandle", (1, 201, 205, 400), ENDED),
]
"""On a mover each."""

NEVER_FOUND = [Case("cuGetProcAddress_v2", (1,), WITHOUT)]

IN_THE_ENGINE: dict[str, tuple[int, ...]] = {
    "cuCtxGetCurrent": (3, 4),
    "cuCtxSetCurrent": (3, 4, 201),
    "cuDeviceGetUuid": (1, 3, 4, 101),
    "cuDeviceGetUuid_v2": (1, 3, 4, 101),
    "cuPointerGetAttribute": (1, 3, 4, 101, 201),
    "cuMemGetAddressRange_v2": (1, 3, 4, 201, 500),
    "cuIpcGetMemHandle": (1, 2, 201, 205, 400),
    "cuMemRetainAllocationHandle": (1, 3, 4, 800, 801),
    "cuMemGetAllocationPropertiesFromHandle": (1, 3, 4, 800, 801),
    "cuMemExportToShareableHandle": (1, 3, 4, 800, 801),
    "cuMemRelease": (1, 3, 4, 800, 801),
    "cuMemcpyDtoH_v2": (1, 3, 4, 201, 700),
    "cuEventCreate": (1, 2, 3, 4, 201),
    "cuEventRecord": (1, 3, 4, 201, 400),
    "cuEventQuery": (1, 4, 400, 700, 719),
}


def words_of(cuda: FakeCuda, call: str, code: int) -> str:
    name = ctypes.c_char_p()
    assert not cuda.raw.cuGetErrorName(code, ctypes.byref(name))
    assert name.value is not None
    return f"{call}: {name.value.decode()} ({code})"


class Rank:
    """A rank's memory and runs."""

    def __init__(self, cuda: FakeCuda, memory: Memory) -> None:
        run = Run(0, 0, 8192, 0, 4096)
        if memory is Memory.ROWS:
            run = Run(0, 0, 8192, 0, 256, 16, 512, 256)
        self.shard = RankShard((Layer("layer.0", 4096, (run,)),), BLOCKS)
        self.size = BLOCKS * 8192
        cuda.driver.enter(cuda.devices[FIRST])
        self.pointer = cuda.map_pages(3 << 20) if memory is Memory.PAGES else cuda.allocate(self.size)
        self.export: Export = export(cuda.driver, self.pointer, 3 << 20 if memory is Memory.PAGES else self.size)
        self.bytes: Bytes = cuda.bytes_at(self.pointer, self.size)


class Life:
    """One mover with its own faults."""

    def __init__(self, cuda: FakeCuda, rules: Path, version: int, ranks: dict[Memory, Rank]) -> None:
        self._cuda, self._rules, self._ranks, self._tours = cuda, rules, ranks, 0
        self._closed = False
        environment = cuda.environment(FAKE_CUDA_DELAY_US=0, FAKE_CUDA_FAULTS=rules, FAKE_CUDA_VERSION=version)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            patch.setattr(mover, "PROCESS", "tests.cuda.small_mover")
            self.link = GpuLink(f"cuda:{FIRST}", POOL_BYTES)

    def fail(self, rule: str) -> None:
        fresh = self._rules.with_suffix(".new")
        fresh.write_text(f"{rule}\n")
        fresh.rename(self._rules)

    def calm(self) -> None:
        self._rules.unlink(missing_ok=True)

    def held(self) -> tuple[int, int]:
        """What the mover has open, and how often it maps memory of a GPU."""
        if is_gone(self.link.pid):
            return 0, 0
        entries = os.listdir(f"/proc/{self.link.pid}/fd")
        return len(entries), Path(f"/proc/{self.link.pid}/maps").read_text().count(f"{self._cuda.directory}/memory")

    def tour(self, memory: Memory) -> str:
        """Attach, store, load, detach; what the mover says is wrong, or an empty text."""
        rank, self._tours = self._ranks[memory], self._tours + 1
        places = [self._tours % 64 * PLACE, self._tours % 64 * PLACE + 8192]
        rank.bytes[:] = np.random.default_rng(self._tours).integers(0, 256, rank.size, np.uint8)
        whole = rank.bytes.copy()
        pages = rank.export.pages
        attachment = 0
        try:
            attachment = self.link.attach(rank.export.handle, [rank.shard], pages.hand_over if pages else None)
            self.link.wait([self.link.submit(attachment, Direction.STORE, places, [0, 1])])
            for block in range(BLOCKS):
                rank.bytes[block * 8192 : block * 8192 + 8192 : 2] = 0
            self.link.wait([self.link.submit(attachment, Direction.LOAD, places, [0, 1])])
            for block in range(BLOCKS):
                at, width, count, step = block * 8192, 4096, 1, 4096
                if memory is Memory.ROWS:
                    width, count, step = 256, 16, 512
                for piece in range(at, at + count * step, step):
                    assert np.array_equal(rank.bytes[piece : piece + width], whole[piece : piece + width])
            return self.leave(attachment)
        except RuntimeError as problem:
            return str(problem) if "the mover ended" in str(problem) else self.leave(attachment) or str(problem)

    def leave(self, attachment: int) -> str:
        """Detach, and see that it lives on without the memory; the last words of a mover that does not."""
        try:
            if attachment:
                self.link.detach(attachment)
            wait_until(lambda: not self.held()[1], 20)
            self.link.await_answer()
        except RuntimeError as problem:
            return str(problem)
        return ""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.link.__exit__()


@pytest.fixture(scope="module")
def ranks(cuda: FakeCuda) -> Iterator[dict[Memory, Rank]]:
    """One of each kind."""
    ranks = {memory: Rank(cuda, memory) for memory in Memory}
    yield ranks
    cuda.driver.enter(cuda.devices[FIRST])
    for rank in ranks.values():
        cuda.free(rank.pointer)


@pytest.fixture
def begin(cuda: FakeCuda, ranks: dict[Memory, Rank], tmp_path: Path) -> Iterator[Callable[[int], Life]]:
    """Starts a mover, on a driver of this version."""
    with ExitStack() as stack:
        count = iter(range(1000))

        def begin(version: int = 12080) -> Life:
            life = Life(cuda, tmp_path / f"rules-{next(count)}", version, ranks)
            stack.callback(life.close)
            return life

        yield begin


def test_no_call_is_left_out() -> None:
    walked = {case.call for case in (*OPENING, *RUNNING, *RUNNING_OLD, *ENDING, *NEVER_FOUND)} | set(IN_THE_ENGINE)
    assert walked == set(calls._PROTOTYPES) | {"cuMemcpyBatchAsync"}


def test_a_gpu_that_cannot_be_opened_refuses_the_rank_and_is_opened_by_the_next(
    cuda: FakeCuda, begin: Callable[..., Life]
) -> None:
    life = begin()
    for case in OPENING:
        for code in case.codes:
            life.fail(f"{case.call} 1 {code}")
            assert words_of(cuda, case.call, code) in life.tour(case.memory)
    life.calm()
    assert life.tour(Memory.HANDLE) == ""


@pytest.mark.parametrize("cases", [RUNNING, RUNNING_OLD, NEVER_FOUND], ids=["new", "old", "search"])
def test_what_fails_costs_a_rank_or_a_job_and_leaves_nothing(
    cuda: FakeCuda, begin: Callable[..., Life], cases: list[Case]
) -> None:
    life = begin(cases[0].version)
    held = None
    for case in cases:
        for code in case.codes:
            # While the pool is not page-locked that is tried ahead of use, too.
            life.fail(f"{case.call} {0 if case.call == 'cuMemHostRegister_v2' else 1} {code}")
            said = life.tour(case.memory)
            life.calm()
            if case.outcome is Outcome.WITHOUT:
                assert said == ""
            else:
                assert words_of(cuda, case.call, code) in said
                assert "the mover ended" not in said
            assert life.tour(case.memory) == "", f"after {case.call} {code}"
            held = held or life.held()
            assert life.held() == held, f"after {case.call} {code}"


def test_what_only_a_new_process_helps_against_ends_the_mover_and_frees_all(
    cuda: FakeCuda, begin: Callable[..., Life]
) -> None:
    free = cuda.free_bytes()
    walk = [(case, code) for case in ENDING for code in case.codes]
    # The next one starts while this one is at work.
    spare = begin(walk[0][0].version)
    for number, (case, code) in enumerate(walk):
        life = spare
        if number + 1 < len(walk):
            spare = begin(walk[number + 1][0].version)
        life.fail(f"{case.call} 1 {code}")
        said = life.tour(case.memory)
        if "the mover ended" not in said:
            # Of a rank that is refused it says so, and then ends.
            assert words_of(cuda, case.call, code) in said, f"{case.call} {code}"
            wait_until(lambda life=life: is_gone(life.link.pid), 20)  # type: ignore[misc]
            said = life.leave(0)
        assert words_of(cuda, case.call, code) in said, f"{case.call} {code}"
        assert is_gone(life.link.pid)
        life.close()
    assert cuda.free_bytes() == free
    assert begin().tour(Memory.PAGES) == ""


@pytest.mark.parametrize("call", IN_THE_ENGINE)
def test_a_call_that_fails_in_the_engine_is_named_there_and_can_be_made_again(
    cuda: FakeCuda, ranks: dict[Memory, Rank], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    cuda.driver.enter(cuda.devices[FIRST])
    handle, paged = ranks[Memory.HANDLE], ranks[Memory.PAGES]
    assert paged.export.pages is not None
    pages = paged.export.pages
    stream = cuda.driver.stream()

    def everything() -> None:
        export(cuda.driver, handle.pointer, handle.size)
        export(cuda.driver, paged.pointer, 3 << 20)
        cuda.driver.use(cuda.driver.current)
        os.close(pages._open(1))
        cuda.driver.read(handle.pointer, 16)
        compute = ComputeStream(cuda.driver)
        moment = compute.mark(stream)
        wait_until(lambda: compute.passed(moment))

    everything()
    free, before = cuda.free_bytes(), len(os.listdir("/proc/self/fd"))
    for code in IN_THE_ENGINE[call]:
        with cuda.failing(monkeypatch, f"{call} 1 {code}"), pytest.raises(HpkvError) as caught:
            everything()
        assert words_of(cuda, call, code) in str(caught.value)
        assert caught.value.hint
        if call == "cuMemRelease":
            _give_up_a_handle(cuda, paged.pointer)
        everything()
    assert (cuda.free_bytes(), len(os.listdir("/proc/self/fd"))) == (free, before)


def _give_up_a_handle(cuda: FakeCuda, pointer: int) -> None:
    """The one that could not be given back, and would keep the memory as long as the engine lives."""
    handle = ctypes.c_uint64()
    cuda.driver.call("cuMemRetainAllocationHandle", ctypes.byref(handle), pointer)
    for _ in range(2):
        cuda.driver.call("cuMemRelease", handle.value)
