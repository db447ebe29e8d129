"""The share of a card that vLLM wants to find free at its start, by the real vLLM's own check."""

import pytest

from tests.support.vllm_engines import said_by_a_fork

pytestmark = pytest.mark.vllm

# In a process of its own, as vLLM always is. The trainer takes 45 GB between both looks at the card.
_PROGRAM = """
from types import SimpleNamespace
import torch
from vllm.v1.worker.utils import request_memory
from pipeline.rollout.generation.vllm.core import memory_share
from pipeline.rollout.generation.vllm.process import _refusal
GB = 10**9
torch.cuda.mem_get_info = lambda: (75 * GB, 80 * GB)
found = SimpleNamespace(total_memory=80 * GB, free_memory=30 * GB, device_="cuda:0")
for cache_bytes in (%d, 0):
    wanted = SimpleNamespace(gpu_memory_utilization=memory_share(cache_bytes))
    try:
        request_memory(found, wanted)
    except ValueError as error:
        end = f"{_refusal(error).kind} {error}"
    else:
        end = "starts"
    say(f"cache {cache_bytes}: share {wanted.gpu_memory_utilization:.4f}, {' '.join(end.split())}")
"""
_CACHE_BYTES = 8 * 10**9


@pytest.fixture(scope="module")
def ends(forkserver):
    """The end of a start with a cache of its own size, and of one with a cache of the rest."""
    found = said_by_a_fork(_PROGRAM % _CACHE_BYTES, forkserver).splitlines()
    assert len(found) == 2
    return found


def test_with_a_cache_of_its_own_size_vllm_starts_though_a_trainer_loads_meanwhile(ends):
    assert ends[0].startswith(f"cache {_CACHE_BYTES}: ") and ends[0].endswith(", starts")


def test_a_cache_without_a_size_is_the_rest_of_a_share_and_a_card_that_fills_meanwhile_is_no_wrong_configuration(ends):
    """It would end the run; a worker that starts again finds another share."""
    assert ends[1].startswith("cache 0: share 0.5625, engine Free memory on device cuda:0")
