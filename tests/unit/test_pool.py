"""The pool file: allocated in full, private, taken over after a crash, never taken from anyone alive."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpkv_client.errors import Busy, ConfigError, NotPermitted
from hpkv_daemon.pool import file
from hpkv_daemon.pool.file import STEP_BYTES, Pool, discard

MIB = 1 << 20
NOBODY = 65534


def ignore(_done: int, _total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def pools() -> Iterator[Callable[..., Pool]]:
    """``Pool.open`` whose pools are closed with the test."""
    opened: list[Pool] = []

    def open_pool(directory: Path, size: int, progress: Callable[[int, int], None] = ignore) -> Pool:
        opened.append(Pool.open(directory, size, progress))
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close(unlink=True)


def killed_in_possession(directory: Path, size: int) -> int:
    """Have a process open the pool and die by SIGKILL; its pid."""
    code = (
        "import os, signal, sys; from pathlib import Path; from hpkv_daemon.pool.file import Pool\n"
        "pool = Pool.open(Path(sys.argv[1]), int(sys.argv[2]), lambda *_: None)\n"
        "os.pwrite(pool.fileno(), b'left behind', 0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(directory), str(size)])
    assert process.wait() == -signal.SIGKILL
    return process.pid


def test_the_file_is_allocated_in_full_and_private(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pool = pools(tmp_path, 8 * MIB)
    info = pool.path.stat()
    assert pool.path == tmp_path / "pool"
    assert pool.size == info.st_size == 8 * MIB
    assert info.st_blocks * 512 >= 8 * MIB
    assert stat.S_IMODE(info.st_mode) == 0o600


def test_a_missing_directory_is_made_for_its_owner_only(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pools(tmp_path / "new", MIB)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_progress_goes_in_steps_from_nothing_to_all(tmpfs: Callable[[str], Path], pools: Callable[..., Pool]) -> None:
    size = 2 * STEP_BYTES + MIB
    seen: list[tuple[int, int]] = []
    pools(tmpfs("600m"), size, lambda done, total: seen.append((done, total)))
    assert seen == [(0, size), (STEP_BYTES, size), (2 * STEP_BYTES, size), (size, size)]


def test_sizes_are_cut_to_whole_pages_and_less_than_one_is_refused(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    assert pools(tmp_path / "a", MIB + 5).size == MIB
    with pytest.raises(ConfigError, match="less than one page"):
        pools(tmp_path / "b", 100)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    first = pools(tmp_path, MIB)
    with pytest.raises(Busy, match=f"pid {os.getpid()}"):
        pools(tmp_path, 2 * MIB)
    assert first.path.stat().st_size == MIB
    first.close(unlink=True)
    assert pools(tmp_path, 2 * MIB).size == 2 * MIB


def test_closing_frees_the_memory_and_spares_what_is_foreign(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    (tmp_path / "foreign").write_text("mine")
    pool = pools(tmp_path, MIB)
    pool.close(unlink=True)
    pool.close(unlink=True)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_closing_without_unlink_keeps_the_file(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pools(tmp_path, MIB).close(unlink=False)
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


def test_a_killed_owners_file_is_reused_at_the_new_size(
    tmpfs: Callable[[str], Path], pools: Callable[..., Pool]
) -> None:
    directory = tmpfs("24m")
    killed_in_possession(directory, 16 * MIB)
    left = (directory / "pool").stat()
    pool = pools(directory, 20 * MIB)
    assert pool.path.stat().st_ino == left.st_ino
    assert pool.path.stat().st_blocks * 512 == 20 * MIB
    pool.close(unlink=False)
    smaller = pools(directory, 4 * MIB)
    assert smaller.path.stat().st_blocks * 512 == 4 * MIB


def test_a_pool_that_does_not_fit_leaves_nothing_and_says_what_would(
    tmpfs: Callable[[str], Path], pools: Callable[..., Pool]
) -> None:
    directory = tmpfs("16m")
    (directory / "foreign").write_bytes(b"x" * MIB)
    with pytest.raises(ConfigError) as caught:
        pools(directory, 32 * MIB)
    assert "33554432 bytes" in caught.value.message
    assert "15 MiB" in caught.value.message
    assert "HPKV_KV_MEM_POOL_SIZE" in caught.value.hint
    assert [path.name for path in directory.iterdir()] == ["foreign"]
    assert os.statvfs(directory).f_bfree * 4096 >= 14 * MIB


def test_a_stop_in_the_middle_of_the_allocation_leaves_nothing(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    def stop(done: int, _total: int) -> None:
        if done:
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        pools(tmp_path, MIB, stop)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_refused_and_its_target_untouched(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "pool-directory"
    directory.mkdir(0o700)
    (directory / "pool").symlink_to(victim)
    with pytest.raises(ConfigError, match="is a link"):
        pools(directory, MIB)
    (directory / "pool").unlink()
    (directory / "pool").hardlink_to(victim)
    with pytest.raises(ConfigError, match="not a plain file of its own"):
        pools(directory, MIB)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_file_is_refused_and_left(
    tmp_path: Path, pools: Callable[..., Pool], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "pool")
    before = (tmp_path / "pool").lstat()
    with pytest.raises(ConfigError, match="pool file"):
        pools(tmp_path, MIB)
    assert (tmp_path / "pool").lstat().st_ino == before.st_ino


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_users_file_is_refused_and_left(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    (tmp_path / "pool").write_text("theirs")
    os.chown(tmp_path / "pool", NOBODY, NOBODY)
    with pytest.raises(NotPermitted):
        pools(tmp_path, MIB)
    assert (tmp_path / "pool").read_text() == "theirs"


def test_a_file_that_an_orphaned_mover_still_maps_is_waited_for(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    first = pools(tmp_path, MIB)
    read_end, write_end = os.pipe()
    mover = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('mapped', flush=True); sys.stdin.read()"],
        stdin=read_end,
        stdout=subprocess.PIPE,
        pass_fds=(first.fileno(),),
    )
    os.close(read_end)
    assert mover.stdout is not None
    assert mover.stdout.readline() == b"mapped\n"
    first.close(unlink=False)
    opened: list[Pool] = []
    opener = threading.Thread(target=lambda: opened.append(pools(tmp_path, MIB)))
    opener.start()
    opener.join(0.3)
    waited = opener.is_alive()
    os.close(write_end)
    mover.communicate()
    opener.join(10)
    assert waited
    assert [pool.size for pool in opened] == [MIB]


def test_a_mover_that_does_not_go_is_named_and_the_pool_left(
    tmp_path: Path, pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_MOVERS_LEAVE_SECONDS", 0.2)
    first = pools(tmp_path, MIB)
    (tmp_path / "index").write_text("precious")
    mover = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(first.fileno(),))
    first.close(unlink=False)
    try:
        for attempt in (lambda: pools(tmp_path, MIB), lambda: pools(tmp_path, 2 * MIB), lambda: discard(tmp_path)):
            with pytest.raises(Busy, match="still mapped by a mover") as caught:
                attempt()
            assert "fuser -k" in caught.value.hint
        assert (tmp_path / "index").read_text() == "precious"
        assert (tmp_path / "pool").stat().st_size == MIB
    finally:
        mover.communicate(b"\n")
    assert pools(tmp_path, MIB).cold == ""


def test_a_pool_says_why_its_bytes_are_nobodys_and_the_index_goes_first(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    index = tmp_path / "index"

    def reopened(size: int) -> str:
        pool = pools(tmp_path, size)
        pool.close(unlink=False)
        return pool.cold

    assert reopened(MIB) == "there was none"
    assert reopened(MIB) == "the pool there has no index"
    index.touch()
    assert reopened(MIB) == ""
    assert reopened(2 * MIB) == f"the pool there has {MIB} bytes, not {2 * MIB}"
    assert not index.exists()
    index.touch()
    (tmp_path / "pool").unlink()
    assert reopened(MIB) == "the index there has no pool"
    assert not index.exists()


def test_something_strange_in_the_place_of_the_index_is_refused_and_left(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    (tmp_path / "index").mkdir()
    with pytest.raises(ConfigError, match="index"):
        pools(tmp_path, MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_pool_that_is_taken_over_keeps_its_bytes_whatever_ends_the_start(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    killed_in_possession(tmp_path, MIB)
    (tmp_path / "index").touch()

    def stop(_done: int, _total: int) -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        pools(tmp_path, MIB, stop)
    pool = pools(tmp_path, MIB)
    assert os.pread(pool.fileno(), 11, 0) == b"left behind"


def test_to_discard_frees_everything_and_spares_what_is_foreign(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    (tmp_path / "foreign").write_text("mine")
    assert discard(tmp_path) == 0
    assert discard(tmp_path / "missing") == 0
    pools(tmp_path, MIB).close(unlink=False)
    (tmp_path / "index").write_bytes(bytes(4096))
    assert discard(tmp_path) >= MIB + 4096
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_a_pool_in_use_is_not_discarded(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pool = pools(tmp_path, MIB)
    with pytest.raises(Busy, match=f"pid {os.getpid()}"):
        discard(tmp_path)
    assert pool.path.exists()
