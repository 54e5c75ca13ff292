"""Entry point of group ``vllm.general_plugins``: makes ``HpkvConnectorV1`` known by name in every vLLM process."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("vllm.hpkv")

CONNECTOR = "HpkvConnectorV1"
SWITCH = "VLLM_ENABLE_HPKV"


def register() -> None:
    """Register the connector and the switch's variable. Cheap, repeatable, and never the end of the engine."""
    try:
        import vllm.envs
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # Known to vLLM's check of its environment, or --fail-on-environ-validation refuses to start.
        vllm.envs.environment_variables.setdefault(SWITCH, lambda: os.environ.get(SWITCH, "0"))
        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, "hpkv_vllm.connector", CONNECTOR)
    except Exception:  # vLLM does not catch: an unknown version must start without HPKV
        log.exception("HPKV cannot register its connector with this version of vLLM; it stays off")
