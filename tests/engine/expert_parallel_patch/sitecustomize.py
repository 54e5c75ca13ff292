"""Test only, by PYTHONPATH: lets vLLM's CPU experts honour their expert map.

The CPU build ignores the map and reads past its weights when experts are spread over ranks. With the map applied
(foreign experts weigh nothing) expert parallelism can be tested on a CPU; KV does not depend on it.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys

_MODULE = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


def _honour_expert_map(module):
    import torch

    experts = module.CPUUnquantizedExperts
    original = experts.apply
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        expert_map = given.get("expert_map")
        if expert_map is not None:
            local = expert_map[given["topk_ids"].long()]
            foreign = local < 0
            given["topk_weights"] = torch.where(foreign, torch.zeros_like(given["topk_weights"]), given["topk_weights"])
            given["topk_ids"] = torch.where(foreign, torch.zeros_like(local), local).to(given["topk_ids"].dtype)
        return original(*bound.args, **bound.kwargs)

    experts.apply = apply


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            _honour_expert_map(module)

        spec.loader.exec_module = load_and_patch
        return spec


sys.meta_path.insert(0, _Finder())
