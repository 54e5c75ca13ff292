"""Identity: what must differ does, whatever the names of things are; and the small shapes around it."""

from __future__ import annotations

from itertools import combinations

import pytest

from hpkv_client.types import KEY_BYTES, Keys, Layer, RankShard, Run, block_key, typed_digest
from hpkv_daemon.core.policy import Lru
from hpkv_daemon.core.store import BlockStore


def keys_of(count: int) -> list[bytes]:
    return [typed_digest("key", number) for number in range(count)]


HOSTILE_NAMES = (
    "../../x",
    "/abs",
    "a/b",
    "a_b",
    "x" * 300,
    "x" * 299,
    "a\0b",
    "a\nb",
    ".",
    "..",
    "",
    " ",
    "é",
    "e\u0301",
    "\udce9",
    "1",
    "None",
)


@pytest.mark.parametrize("wrap", [lambda name: (name,), lambda name: ("a", name, 1)])
def test_no_two_names_share_a_digest_however_they_look(wrap) -> None:  # type: ignore[no-untyped-def]
    digests = {typed_digest(*wrap(name)) for name in HOSTILE_NAMES}
    assert len(digests) == len(HOSTILE_NAMES)
    assert {len(digest) for digest in digests} == {KEY_BYTES}


def test_a_salt_an_adapter_an_image_and_a_namespace_of_one_name_are_four_things() -> None:
    def digest(
        adapter: str | None = None, salt: str | None = None, image: str | None = None, namespace: str = ""
    ) -> bytes:
        return typed_digest(namespace, adapter, salt, image, b"same tokens")

    digests = {digest(), digest(adapter="s"), digest(salt="s"), digest(image="s"), digest(namespace="s")}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("ab",), ("a", "b")),
        (("a", ""), ("a",)),
        (("",), ()),
        (("",), (None,)),
        (("",), (b"",)),
        (("a",), (b"a",)),
        (("1",), (1,)),
        ((1, 23), (12, 3)),
        ((-1,), (1,)),
        ((0,), (None,)),
        (("a", None), (None, "a")),
        ((b"s\x01\x00\x00\x00\x00\x00\x00\x00a",), ("a",)),
        ((1 << 64,), (1 << 65,)),
    ],
)
def test_field_lists_that_differ_in_type_cut_or_order_differ_in_digest(
    one: tuple[bytes | str | int | None, ...], other: tuple[bytes | str | int | None, ...]
) -> None:
    assert typed_digest(*one) != typed_digest(*other)
    assert typed_digest(*one) == typed_digest(*one)


def test_a_digest_is_the_same_in_every_release() -> None:
    # Stored blocks outlive the process and the version that named them.
    expected = "4596ed61572ea1775e3f89c544b4614e9e942b7a3146e891014a0aed439ffe3b"
    assert typed_digest("a", b"b", 3, None).hex() == expected


def test_a_block_key_depends_on_namespace_group_and_the_whole_prefix_hash() -> None:
    base = (b"f" * 32, 0, b"h" * 32)
    keys = {
        block_key(*base),
        block_key(b"g" * 32, *base[1:]),
        block_key(base[0], 1, base[2]),
        block_key(base[0], 0, b"h" * 31 + b"i"),
        block_key(base[0], 0, b"i" + b"h" * 31),
        block_key(base[0], 0, b"h" * 8),
    }
    assert len(keys) == 6


@pytest.mark.parametrize("shared", [slice(0, 8), slice(24, 32), slice(0, 31), slice(1, 32)])
def test_keys_that_agree_in_one_part_only_are_different_blocks(shared: slice) -> None:
    one, other = bytearray(typed_digest("one")), bytearray(typed_digest("other"))
    other[shared] = one[shared]
    store = BlockStore(1 << 20, Lru)
    namespace = store.open_namespace(b"n" * 32, 4096)
    store.commit(store.reserve(namespace, None, [bytes(one)], "writer"))
    assert store.match(namespace, Keys.of([bytes(one)])) == 1
    assert store.match(namespace, Keys.of([bytes(other)])) == 0
    assert not store.contains(namespace, bytes(other))


# -- keys ----------------------------------------------------------------------------------------------------


def test_keys_behave_like_the_list_of_their_keys() -> None:
    listed = keys_of(7)
    keys = Keys.of(listed)
    assert len(keys) == 7
    assert list(keys) == listed
    assert [keys[i] for i in range(-7, 7)] == [listed[i] for i in range(-7, 7)]
    assert listed[3] in keys
    assert typed_digest("absent") not in keys


@pytest.mark.parametrize("step", [None, 1, 2, -1, -3])
@pytest.mark.parametrize("start", [None, 0, 2, 5, 9, -2, -9])
@pytest.mark.parametrize("stop", [None, 0, 2, 5, 9, -2, -9])
def test_a_slice_of_keys_is_keys(start: int | None, stop: int | None, step: int | None) -> None:
    listed = keys_of(5)
    cut = Keys.of(listed)[start:stop:step]
    assert isinstance(cut, Keys)
    assert list(cut) == listed[start:stop:step]


def test_an_index_beyond_the_keys_is_an_error() -> None:
    keys = Keys.of(keys_of(3))
    for index in (3, -4, 1000):
        with pytest.raises(IndexError):
            keys[index]
    with pytest.raises(IndexError):
        Keys(b"")[0]


@pytest.mark.parametrize("length", [1, 31, 33, 63])
def test_a_blob_that_is_no_whole_number_of_keys_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        Keys(bytes(length))
    with pytest.raises(ValueError, match=str(length)):
        Keys.of([typed_digest("good"), bytes(length)])


def test_keys_of_wrong_length_are_refused_even_when_their_sum_fits() -> None:
    with pytest.raises(ValueError, match="31"):
        Keys.of([bytes(31), bytes(33)])


# -- replicas and runs ---------------------------------------------------------------------------------------


def test_a_run_ends_at_its_last_fragment() -> None:
    run = Run(0, 100, 1000, 7, 8, count=3, local_step=50, canonical_step=20)
    assert run.size == 24
    assert run.last_local_byte(4) == 100 + 3 * 1000 + 2 * 50 + 8
    assert run.last_local_byte(1) == run.last_local_byte(0) == 100 + 2 * 50 + 8
    assert run.last_canonical_byte() == 7 + 2 * 20 + 8
    assert RankShard((Layer("l", 64, (run, run)), Layer("m", 64, (run,))), 4).block_bytes == 72


def test_many_fields_leave_no_pair_equal() -> None:
    fields: list[tuple[bytes | str | int | None, ...]] = [
        (tag, *rest) for tag in ("", b"", 0, None) for rest in ((), ("",), (b"",), (0,), (None,))
    ]
    assert all(typed_digest(*one) != typed_digest(*other) for one, other in combinations(fields, 2))
