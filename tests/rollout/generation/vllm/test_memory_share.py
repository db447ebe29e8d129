"""The share of a card that vLLM wants to find free at its start, by the real vLLM's own check."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

# In a process of its own, as vLLM always is. The trainer takes 45 GB between both looks at the card.
_PROGRAM = """
import sys
from types import SimpleNamespace
import torch
from vllm.v1.worker.utils import request_memory
from pipeline.rollout.generation.vllm.core import memory_share
from pipeline.rollout.generation.vllm.process import _refusal
GB = 10**9
torch.cuda.mem_get_info = lambda: (75 * GB, 80 * GB)
wanted = SimpleNamespace(gpu_memory_utilization=memory_share(int(sys.argv[1])))
found = SimpleNamespace(total_memory=80 * GB, free_memory=30 * GB, device_="cuda:0")
print(f"share {wanted.gpu_memory_utilization:.4f}", flush=True)
try:
    request_memory(found, wanted)
except ValueError as error:
    print(_refusal(error).kind, error)
else:
    print("starts")
"""


def asked(cache_bytes):
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(cache_bytes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_with_a_cache_of_its_own_size_vllm_starts_though_a_trainer_loads_meanwhile():
    found = asked(8 * 10**9)

    assert found.stdout.endswith("starts\n"), found.stderr


def test_a_cache_without_a_size_is_the_rest_of_a_share_and_a_card_that_fills_meanwhile_is_no_wrong_configuration():
    """It would end the run; a worker that starts again finds another share."""
    found = asked(0)

    assert "share 0.5625\n" in found.stdout, found.stderr
    assert "\nengine Free memory on device cuda:0" in found.stdout
