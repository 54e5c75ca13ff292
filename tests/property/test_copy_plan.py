"""Whatever the runs of a rank are: a plan's copies, and its detour through a buffer, move the bytes they name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_client.types import Run
from hpkv_daemon.movers.cuda.plan import Batch, CopyPlan, cut, rows_of

HOST, DEVICE = 1 << 20, 1 << 40


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[Run], int, int]:
    """Runs that share no byte on either side, blocks, and the bytes of a canonical block.

    A block is a grid of cells: each run takes some cells of a row, in the device's order or across it.
    """
    width, across, down = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    blocks, gap = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    cells = across * down
    interleaved = draw(st.booleans())
    stride = cells * width + gap if interleaved else width * across + gap
    runs = []
    for row in range(down):
        local = row * across * width if interleaved else row * blocks * stride
        if draw(st.booleans()):
            runs.append(Run(0, local, stride, row * width, width, across, width, down * width))
        else:
            runs.extend(Run(0, local + i * width, stride, (i * down + row) * width, width) for i in range(across))
    return runs, blocks, cells * width


def reference(runs: list[Run], chosen: list[int], slots: list[int], size: int) -> dict[int, int]:
    """Device address -> host address of every byte."""
    return {
        DEVICE + run.local_offset + block * run.block_stride + i * run.local_step + byte: HOST
        + slot * size
        + run.canonical_offset
        + i * run.canonical_step
        + byte
        for block, slot in zip(chosen, slots, strict=True)
        for run in runs
        for i in range(run.count)
        for byte in range(run.fragment)
    }


def moved(batch: Batch) -> dict[int, int]:
    found: dict[int, int] = {}
    for device, host, size in zip(*(array.tolist() for array in batch), strict=True):
        for byte in range(size):
            assert device + byte not in found
            found[device + byte] = host + byte
    return found


@given(ranks(), st.integers(1, 64), st.sampled_from([1, 8, 40]), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_copies_move_the_bytes_that_the_runs_name_and_cross_no_border(
    rank: tuple[list[Run], int, int], extent: int, short: int, chance: Callable[..., int]
) -> None:
    runs, blocks, size = rank
    chosen = list(range(blocks))
    slots = list(range(blocks + 2))
    chance.shuffle(chosen)  # type: ignore[attr-defined]
    chance.shuffle(slots)  # type: ignore[attr-defined]
    slots = slots[:blocks]
    plan = CopyPlan(runs, [DEVICE], 0, short)
    assert not plan.staged
    assert all(rows.pieces == 1 or rows.width <= min(rows.device_step, rows.host_step) for rows in plan.rows)
    if plan.by_rows:
        assert 2 * len(plan.rows) <= plan.pieces
        assert plan.block_bytes >= short * len(plan.rows)
    hosts = np.array([HOST + slot * size for slot in slots], np.int64)
    batch = cut(plan.batch(np.array(chosen, np.int64), hosts), HOST, extent)
    assert moved(batch) == reference(runs, chosen, slots, size)
    assert ((batch.host - HOST) // extent == (batch.host + batch.size - 1 - HOST) // extent).all()
    single = [
        (rows.device + i * rows.device_step, rows.host + i * rows.host_step, rows.width)
        for block, host in zip(chosen, hosts.tolist(), strict=True)
        for rows in rows_of(plan, block, host, HOST, extent)
        for i in range(rows.pieces)
    ]
    assert moved(Batch(*(np.array(column, np.int64) for column in zip(*single, strict=True)))) == moved(batch)


@given(ranks())
@settings(max_examples=150, deadline=None)
def test_a_staged_block_is_the_devices_bytes_in_one_buffer_and_finds_its_place(
    rank: tuple[list[Run], int, int],
) -> None:
    runs, blocks, size = rank
    plan = CopyPlan(runs, [0], most_staged_bytes=1 << 20)
    if not plan.staged:
        return
    device = np.random.default_rng(1).integers(0, 256, max(run.last_local_byte(blocks) for run in runs), np.uint8)
    for block in range(blocks):
        buffer, pool, back = np.zeros(plan.staged_bytes, np.uint8), np.zeros(size, np.uint8), device.copy()
        batch = plan.batch(np.array([block], np.int64), np.array([0], np.int64))
        assert len(batch.size) * 2 <= sum(run.count for run in runs)
        for at, host, length in zip(*(array.tolist() for array in batch), strict=True):
            buffer[host : host + length] = device[at : at + length]
            back[at : at + length] = 0
        plan.scatter(buffer, pool, 0)
        for at, host in reference(runs, [block], [0], size).items():
            assert pool[host - HOST] == device[at - DEVICE]
        buffer[:] = 0
        plan.gather(pool, 0, buffer)
        for at, host, length in zip(*(array.tolist() for array in batch), strict=True):
            back[at : at + length] = buffer[host : host + length]
        assert np.array_equal(back, device)


KIB = 1 << 10


def plan_of(layers: int, piece: int, steps: list[int]) -> CopyPlan:
    """Layers of one piece each, so many bytes behind each other on the device, dense on the host."""
    places = np.cumsum([0, *steps]).tolist()
    runs = [Run(0, places[layer], piece, layer * piece, piece) for layer in range(layers)]
    return CopyPlan(runs, [DEVICE], 1 << 24)


def test_short_pieces_of_layers_at_equal_steps_are_one_strided_copy() -> None:
    plan = plan_of(80, 8 * KIB, [1 << 26] * 79)
    assert plan.by_rows
    assert [(rows.width, rows.pieces, rows.device_step, rows.host_step) for rows in plan.rows] == [
        (8 * KIB, 80, 1 << 26, 8 * KIB)
    ]
    assert plan.short_bytes == 0


def test_layers_of_two_allocations_are_two_strided_copies() -> None:
    plan = plan_of(80, 8 * KIB, [1 << 26] * 39 + [1 << 32] + [1 << 26] * 39)
    assert [rows.pieces for rows in plan.rows] == [40, 40]


def test_what_cannot_be_gathered_is_told() -> None:
    scattered = plan_of(80, 8 * KIB, [(3 + layer % 5) << 24 for layer in range(79)])
    assert not scattered.by_rows
    assert scattered.short_bytes == 8 * KIB
    # A strided copy has no steps of 2 GiB and more.
    assert not plan_of(80, 8 * KIB, [1 << 31] * 79).by_rows
    # A call that moves next to nothing is not worth more than a place in a batch.
    assert not plan_of(3, 8 * KIB, [1 << 26] * 2).by_rows


def test_long_pieces_stay_in_one_batch() -> None:
    plan = plan_of(80, 32 * KIB, [1 << 26] * 79)
    assert (plan.by_rows, plan.short_bytes, plan.pieces) == (False, 0, 80)


def test_a_staged_block_whose_layers_are_short_is_gathered_by_both() -> None:
    # A token's heads together under TP: the CPU orders tokens and heads, the device gathers layers.
    runs = [Run(0, layer << 26, 8 * KIB, layer * 64 * KIB, 512, 16, 512, 4 * KIB) for layer in range(80)]
    plan = CopyPlan(runs, [DEVICE], 1 << 24)
    assert (plan.staged, plan.by_rows, len(plan.rows), plan.pieces) == (True, True, 1, 80)
