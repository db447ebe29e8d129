"""What only a CUDA device can show: page-locked batches, the same numbers on the card, a whole run on it."""

import ctypes
import subprocess

import pytest
import torch

from pipeline import codec
from pipeline.experience_maker import NaiveExperienceMaker
from pipeline.gpus import LIBRARY, Nvml
from pipeline.metrics_slab import MetricsSlab
from pipeline.models import action_log_probs
from pipeline.stream import Connection
from pipeline.torch_memory import show_memory
from tests import tiny
from tests.daemon import SMALL, Daemon, task  # noqa: F401 - a fixture
from tests.experiences import made_up
from tests.slabs import SLOTS, begun, value
from tests.test_stream import House

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.needs("nvidia-smi")
def test_nvml_says_what_nvidia_smi_says():
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]
    shown = [
        line.split(", ")
        for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    nvml = Nvml(ctypes.CDLL(LIBRARY))

    gpus = nvml.read()
    nvml.close()

    assert [(gpu.uuid, gpu.capacity_bytes >> 20) for gpu in gpus] == [(uuid, int(total)) for uuid, total, _ in shown]
    for gpu, (_, _, used) in zip(gpus, shown, strict=True):
        assert abs((gpu.used_bytes >> 20) - int(used)) < 1024
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1


def test_allocated_memory_of_a_process_on_the_gpu_is_shown(tmp_path):
    slab = MetricsSlab.create(tmp_path / "metrics", SLOTS)
    held = torch.ones(1 << 20, device="cuda")

    show_memory(begun(slab, "rollout"))

    assert value(slab, "rlhfd_torch_memory_bytes", state="allocated") >= held.nbytes
    assert value(slab, "rlhfd_torch_memory_bytes", state="reserved") >= held.nbytes
    slab.close()


class Tokenizer:
    pad_token_id = tiny.PAD
    eos_token_id = tiny.EOS


def test_a_batch_for_the_gpu_is_gathered_into_page_locked_memory():
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(made_up(), memory)
    reader = codec.ExtentReader(memory[: encoded.nbytes])

    batch = codec.gather([(reader, [0, 2])], pin_memory=True)

    assert batch.sequences.is_pinned()
    assert batch.info["score"].is_pinned()


def test_a_leased_batch_arrives_on_the_gpu_as_it_was_sealed(tmp_path):
    house = House(tmp_path)
    connection: Connection = house.connect()
    for _ in range(4):
        house.turn()
        connection.receive(0.0)

    batch = connection.poll(device="cuda:0")

    expected = torch.cat([house.rolled[0].reward, house.rolled[1].reward])
    assert batch.experience.sequences.device.type == "cuda"
    assert torch.equal(batch.experience.reward.cpu(), expected)
    house.ledger.close()
    house.arena.close()


def test_log_probs_of_a_rollout_on_the_gpu_are_those_of_the_cpu():
    actor = tiny.llama().cuda()
    maker = NaiveExperienceMaker(
        actor, None, lambda **row: torch.arange(len(row["input_ids"]), dtype=torch.float32), actor, Tokenizer(),
        use_grpo=True, num_generation=4,
    )  # fmt: skip
    prompts = torch.tensor([[tiny.PAD, 5, 6], [7, 8, 9]])
    experience = maker.make_experience(prompts, (prompts != tiny.PAD).long(), max_length=12, seed=1)

    again = action_log_probs(tiny.llama(), experience.sequences, experience.attention_mask, 9)

    mask = experience.action_mask
    assert torch.allclose(again[mask], experience.action_log_probs[mask], atol=1e-4)


def test_a_whole_run_on_the_gpu_trains_and_leaves_nothing(tmp_path, task):  # noqa: F811
    with Daemon(
        tmp_path, *SMALL, "trainer.max_steps=5", task=task, environment={"CUDA_VISIBLE_DEVICES": "0"}
    ) as daemon:
        devices = {process["role"]: process["devices"] for process in daemon.wait_ready()["processes"]}
        assert devices == {"buffer": "cpu", "trainer": "0", "rollout": "0"}
        assert daemon.wait() == 0
    assert "roles are started without it" not in daemon.errors, "the template opens no GPU"
    assert not daemon.shm_dir.exists()
