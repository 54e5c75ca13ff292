"""The bytes of the protocol: one request of every verb, a reply, an error. They change only with the major version."""

from __future__ import annotations

from hpkv_client import wire
from hpkv_client.types import Layer, MemoryHandle, RankShard, Run
from hpkv_client.wire import Body

REQUEST_ID, SESSION = 0x1020304050, 0x0102030405060708
HEAD = f"cf{REQUEST_ID:016x}cf{SESSION:016x}"
K, L = bytes(range(32)).hex(), bytes(range(32, 64)).hex()

KEY, OTHER = bytes.fromhex(K), bytes.fromhex(L)

_SHARD = RankShard((Layer("l.0", 48, (Run(0, 16, 64, 8, 4, 3, 8, 16),)),), 2, 2, 1)
_MEMFD = MemoryHandle("memfd", 8192, 7, 3, "hpkv-a")
_CUDA = MemoryHandle("cuda_ipc", 9, token=b"t", offset=5, event=b"e")
_CONTROL = MemoryHandle("memfd", 4096, 7, 4, "hpkv-b")

BODIES: dict[str, Body] = {
    "hello": {"major": 1, "minor": 0, "name": "worker", "instance": "a", "engine": "e", "pid": 7},
    "bye": {},
    "heartbeat": {},
    "ping": {"echo": b"\x01"},
    "register": {
        "rank": 1,
        "world": 2,
        "namespace": KEY,
        "model": "m",
        "place": "tp1",
        "block_tokens": 16,
        "device": "cpu",
        "regions": [wire.handle_to_wire(_MEMFD), wire.handle_to_wire(_CUDA)],
        "control": wire.handle_to_wire(_CONTROL),
        **wire.shard_to_wire(_SHARD),
    },
    "unregister": {},
    "reset": {},
    "match": {"keys": KEY + OTHER},
    "acquire": {"keys": KEY + OTHER},
    "release": {"lease": 1 << 40},
    "load": {"job": 3, "lease": 4, "first": 1, "blocks": wire.pack_blocks([5, 70000])},
    "store": {"job": 3, "parent": None, "keys": KEY, "blocks": wire.pack_blocks([5])},
    "cancel": {"job": 3},
    "contains": {"keys": KEY},
    "put": {"job": 3, "keys": KEY, "blocks": wire.pack_blocks([0])},
    "get": {"job": 3, "keys": KEY, "blocks": wire.pack_blocks([0])},
    "info": {},
    "stats": {},
    "leases": {},
    "check": {},
    "explain": {"engine": "e", "last": 5},
    "blocks": {"namespace": KEY, "after": 3},
    "pins": {},
    "pin": {"prefix": "00ff"},
    "unpin": {"prefix": "00ff"},
    "hot": {"last": 5},
    "events": {"after": 7, "most": 9},
    "clear": {"namespace": KEY},
    "config": {},
    "set": {"name": "log_level", "value": "info"},
    "reload": {},
    "drain": {"begin": True},
    "import": {"path": "/p"},
    "scrub": {"begin": True, "bytes_per_second": 5},
}

GOLDEN: dict[str, str] = {
    "acquire": f"94a761637175697265{HEAD}81a46b657973c440{K}{L}",
    "hello": (
        f"94a568656c6c6f{HEAD}"
        "86a56d616a6f7201a56d696e6f7200a46e616d65a6776f726b6572a8696e7374616e6365a161a665"
        "6e67696e65a165a370696407"
    ),
    "bye": f"94a3627965{HEAD}80",
    "heartbeat": f"94a9686561727462656174{HEAD}80",
    "ping": f"94a470696e67{HEAD}81a46563686fc40101",
    "register": (
        f"94a87265676973746572{HEAD}8da472616e6b01a5776f726c6402a96e616d657370616365c420{K}"
        "a56d6f64656ca16da5706c616365a3747031ac626c6f636b5f746f6b656e7310a6646576696365a3"
        "637075a7726567696f6e739285a46b696e64a56d656d6664a473697a65cd2000a370696407a26664"
        "03a46e616d65a668706b762d6185a46b696e64a8637564615f697063a473697a6509a5746f6b656e"
        "c40174a66f666673657405a56576656e74c40165a7636f6e74726f6c85a46b696e64a56d656d6664"
        "a473697a65cd1000a370696407a2666404a46e616d65a668706b762d62a66c61796572739193a36c"
        "2e303091980010400804030810a6626c6f636b7302a87265706c6963617302a77265706c69636101"
    ),
    "unregister": f"94aa756e7265676973746572{HEAD}80",
    "reset": f"94a57265736574{HEAD}80",
    "match": f"94a56d61746368{HEAD}81a46b657973c440{K}{L}",
    "release": f"94a772656c65617365{HEAD}81a56c65617365cf0000010000000000",
    "load": (f"94a46c6f6164{HEAD}84a36a6f6203a56c6561736504a5666972737401a6626c6f636b73c4080500000070110100"),
    "store": (f"94a573746f7265{HEAD}84a36a6f6203a6706172656e74c0a46b657973c420{K}a6626c6f636b73c40405000000"),
    "cancel": f"94a663616e63656c{HEAD}81a36a6f6203",
    "contains": f"94a8636f6e7461696e73{HEAD}81a46b657973c420{K}",
    "put": f"94a3707574{HEAD}83a36a6f6203a46b657973c420{K}a6626c6f636b73c40400000000",
    "get": f"94a3676574{HEAD}83a36a6f6203a46b657973c420{K}a6626c6f636b73c40400000000",
    "info": f"94a4696e666f{HEAD}80",
    "stats": f"94a57374617473{HEAD}80",
    "leases": f"94a66c6561736573{HEAD}80",
    "check": f"94a5636865636b{HEAD}80",
    "explain": f"94a76578706c61696e{HEAD}82a6656e67696e65a165a46c61737405",
    "blocks": f"94a6626c6f636b73{HEAD}82a96e616d657370616365c420{K}a5616674657203",
    "pins": f"94a470696e73{HEAD}80",
    "pin": f"94a370696e{HEAD}81a6707265666978a430306666",
    "unpin": f"94a5756e70696e{HEAD}81a6707265666978a430306666",
    "hot": f"94a3686f74{HEAD}81a46c61737405",
    "events": f"94a66576656e7473{HEAD}82a5616674657207a46d6f737409",
    "clear": f"94a5636c656172{HEAD}81a96e616d657370616365c420{K}",
    "config": f"94a6636f6e666967{HEAD}80",
    "set": f"94a3736574{HEAD}82a46e616d65a96c6f675f6c6576656ca576616c7565a4696e666f",
    "reload": f"94a672656c6f6164{HEAD}80",
    "drain": f"94a5647261696e{HEAD}81a5626567696ec3",
    "import": f"94a6696d706f7274{HEAD}81a470617468a22f70",
    "scrub": f"94a57363727562{HEAD}82a5626567696ec3b062797465735f7065725f7365636f6e6405",
}
