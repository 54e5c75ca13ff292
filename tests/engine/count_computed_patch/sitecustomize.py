"""Test only, by PYTHONPATH: writes how many tokens vLLM's scheduler has computed, one line for each step.

The file is named by COUNT_COMPUTED. vLLM's own counters count a prompt once, however often it is computed.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys

_MODULE = "vllm.v1.core.sched.scheduler"


def _count(module):
    original = module.Scheduler.schedule

    @functools.wraps(original)
    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        with open(os.environ["COUNT_COMPUTED"], "a") as file:
            file.write(f"{output.total_num_scheduled_tokens}\n")
        return output

    module.Scheduler.schedule = schedule


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            _count(module)

        spec.loader.exec_module = load_and_patch
        return spec


if "COUNT_COMPUTED" in os.environ:
    sys.meta_path.insert(0, _Finder())
