"""The device of a process: the GPU that it was given, the CPU, or a refusal; never the CPU in place of a GPU."""

import subprocess
import sys

import pytest

from pipeline.errors import ConfigError
from pipeline.models import device as devices
from pipeline.models.device import allocator_bytes, device_name, grow_segments, process_device

# No machine has as many; CUDA then shows no device, as it does where the driver does not work.
NO_SUCH_GPU = "97"
WITHOUT_A_GPU = ["", "-1", "-1,0"]


# CUDA reads the variable once a process, and this one's is that of each fork: torch is imported once for all of them.
ASKED = """
import os, sys
from pipeline.errors import ConfigError
from pipeline.models.device import process_device

for visible in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        try: print(process_device(), flush=True)
        except ConfigError as error: print(int(error.exit_code), error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def answers():
    """The device, or the refusal, of a process for each list of GPUs that it may see."""
    lists = [NO_SUCH_GPU, *WITHOUT_A_GPU]
    done = subprocess.run([sys.executable, "-c", ASKED, *lists], capture_output=True, text=True, check=True)
    return dict(zip(lists, done.stdout.splitlines(), strict=True))


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(answers):
    answer = answers[NO_SUCH_GPU]

    assert answer.startswith(f"78 this process was given GPU {NO_SUCH_GPU} (CUDA_VISIBLE_DEVICES) and cannot use it: ")
    reason = answer.partition("cannot use it: ")[2].partition(";")[0]
    assert "CUDA" in reason or "NVIDIA" in reason
    assert answer.endswith('; CUDA_VISIBLE_DEVICES="" runs on the CPU')


@pytest.mark.parametrize("visible", WITHOUT_A_GPU)
def test_without_a_gpu_in_the_list_a_process_computes_on_the_cpu(answers, visible):
    assert answers[visible] == "cpu"


def test_a_forked_process_that_cannot_use_cuda_says_that_it_was_forked(monkeypatch):
    import torch

    # As in a fork of a process that had asked CUDA for its devices, with a PyTorch for GPUs or without.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)

    with pytest.raises(ConfigError, match="cannot use it: Cannot re-initialize CUDA in forked subprocess"):
        process_device()


def test_the_cpu_has_its_own_name():
    import torch

    assert device_name(torch.device("cpu")) == "cpu"


def test_a_reason_of_several_lines_is_one_line(monkeypatch):
    import torch

    def fail():
        raise RuntimeError("the driver is too old\n  (found 1).")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)

    with pytest.raises(ConfigError, match=r"cannot use it: the driver is too old \(found 1\); "):
        process_device()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot use it: CUDA shows no device; "):
        process_device()


def test_a_gpu_has_its_name_and_the_bytes_of_the_allocator(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Name of {device}")
    assert device_name(torch.device("cuda:0")) == "Name of cuda:0"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert allocator_bytes() == {}
    for name, value in (("is_initialized", True), ("memory_allocated", 5), ("memory_reserved", 8)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert allocator_bytes() == {"allocated": 5, "reserved": 8}


def test_an_empty_list_means_the_cpu_though_cuda_was_ready_before(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for visible, device in (("", "cpu"), ("1", "cuda:0")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert process_device() == torch.device(device)


def test_segments_grow_on_a_card_where_the_environment_sets_nothing_else(monkeypatch):
    import torch

    card, calls = torch.device("cuda", 0), []
    apply = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda settings: (calls.append(settings), apply(settings))
    )
    monkeypatch.setattr(devices, "_first_tensor", lambda device: calls.append(str(device)))

    assert not grow_segments(torch.device("cpu"), {})
    assert not grow_segments(card, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert not grow_segments(card, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert calls == []
    try:
        assert grow_segments(card, {"PYTORCH_ALLOC_CONF": ""})
    finally:
        apply("expandable_segments:False")
    assert calls == ["expandable_segments:True", "cuda:0"]


def test_a_card_whose_driver_maps_no_pages_has_fixed_segments_and_a_warning(monkeypatch, caplog):
    import torch

    calls = []

    def first_tensor(device):
        raise RuntimeError("CUDA driver error: operation not supported\nmore")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(devices, "_first_tensor", first_tensor)

    assert not grow_segments(torch.device("cuda", 0), {})

    assert calls == ["expandable_segments:True", "expandable_segments:False"]
    assert "do not grow, more of it is reserved: error=CUDA driver error: operation not supported\n" in caplog.text
