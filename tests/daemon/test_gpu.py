"""Behaviour that only a CUDA device can show: page-locked batches, the same numbers on the card, a whole run on it."""

import functools
import gc
import os
import re
import subprocess
import sys
import tempfile
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2 import modeling_qwen2

from pipeline.config.schema import TrainerConfig
from pipeline.experience import codec
from pipeline.models.compiled_layers import Uses, compile_layers
from pipeline.models.float32_logits import compute_in_float32, log_prob_spread
from pipeline.models.fused_kernels import fuse_norms, fuse_rotary
from pipeline.models.log_probs import action_log_probs
from pipeline.models.packing import log_probs_of_rows, prepare_packing
from pipeline.models.pass_size import release_memory
from pipeline.models.recomputation import checkpoint_activations
from pipeline.models.weights.pinned import CudaDriver
from pipeline.models.weights.store import WeightsPublisher, WeightsReader
from pipeline.rollout.generation.graph_capture import CudaDevice, GraphCapture
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.supervisor.gpus import read_once
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.connection import Connection
from pipeline.trainer.learner import Learner
from tests.daemon.test_rank_endings import FAILING, TWO_RANKS
from tests.models.test_compiled_layers import block, flat
from tests.models.test_float32_logits import TOKENS, confident, exact_log_probs
from tests.models.test_float32_logits import rows as probed_rows
from tests.support import tiny, tiny_vision
from tests.support.daemon import SMALL, Daemon, loaded_first, total
from tests.support.experiences import made_up
from tests.support.padded_passes import log_probs_by_packing
from tests.support.protocol import House
from tests.support.slabs import SLOTS, begun, value
from tests.support.tiny import Tokenizer
from tests.support.told import Told
from tests.trainer.test_learner import TRAINER, experience_for, new_learner


def long_llama():
    config = tiny.llama().config
    config.max_position_embeddings = 256
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(tiny.llama().state_dict())
    return model


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.needs("nvidia-smi")
def test_nvml_says_what_nvidia_smi_says():
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]
    shown = [
        line.split(", ")
        for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    ]

    gpus = read_once()

    assert [(gpu.uuid, gpu.capacity_bytes >> 20) for gpu in gpus] == [(uuid, int(total)) for uuid, total, _ in shown]
    for gpu, (_, _, used) in zip(gpus, shown, strict=True):
        assert abs((gpu.used_bytes >> 20) - int(used)) < 1024
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1


def test_allocated_memory_of_a_process_on_the_gpu_is_shown(tmp_path):
    slab = MetricsSlab.create(tmp_path / "metrics", SLOTS)
    held = torch.ones(1 << 20, device="cuda")

    RolloutMetrics(begun(slab, "rollout"), reward_source="function").in_flight(0)

    assert value(slab, "rlhfd_torch_memory_bytes", state="allocated") >= held.nbytes
    assert value(slab, "rlhfd_torch_memory_bytes", state="reserved") >= held.nbytes
    slab.close()


# Passes of ragged rows: each keeps a tensor a layer until its end, of a size that no other pass has.
_RAGGED = """
import sys, torch
from pipeline.models.device import grow_segments
assert grow_segments(torch.device("cuda"), {"PYTORCH_ALLOC_CONF": sys.argv[1]}) == (not sys.argv[1])
for tokens in (9_000, 11_000, 13_500, 17_000, 21_000, 26_000, 32_000):
    kept = [torch.empty(tokens, 2_000 + 150 * layer, device="cuda") for layer in range(12)]
    del kept
print(torch.cuda.memory_reserved() / torch.cuda.max_memory_allocated())
"""


def test_growing_segments_hold_little_more_than_the_tensors_of_ragged_passes():
    fixed, growing = (
        float(
            subprocess.run([sys.executable, "-c", _RAGGED, settings], capture_output=True, text=True, check=True).stdout
        )
        for settings in ("expandable_segments:False", "")
    )

    assert growing < 1.1
    assert growing < fixed


def test_a_batch_for_the_gpu_is_gathered_into_page_locked_memory():
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(made_up(), memory)
    reader = codec.ExtentReader(memory[: encoded.nbytes])

    rows = codec.gather([(reader, [0, 2])], pin_memory=True)
    padded = codec.gather_padded([(reader, [0, 2])], pin_memory=True)

    assert rows.block.is_pinned()
    assert padded.sequences.is_pinned() and padded.info["score"].is_pinned()


def test_a_leased_batch_arrives_on_the_gpu_as_it_was_sealed(tmp_path):
    house = House(tmp_path)
    connection: Connection = house.connect()
    for _ in range(4):
        house.turn()
        connection.receive(0.0)

    batch = connection.poll(device="cuda:0", ragged=True)

    expected = torch.cat([house.rolled[0].reward, house.rolled[1].reward])
    assert {tensor.device.type for tensor in batch.rows.moved.values()} == {"cuda"}
    assert torch.equal(batch.rows.moved["reward"].cpu(), expected)
    assert torch.equal(batch.experience.reward, expected)
    house.close()


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


def test_a_whole_run_on_the_gpu_trains_and_leaves_nothing(tmp_path, task):
    with Daemon(
        tmp_path, *SMALL, "trainer.max_steps=200", task=task, environment={"CUDA_VISIBLE_DEVICES": "0"}
    ) as daemon:
        processes = daemon.wait_ready()["processes"]
        name = torch.cuda.get_device_name(0)
        assert {process["role"]: process["devices"] for process in processes} == {
            "buffer": "cpu", "trainer": "0", "rollout": "0",
        }  # fmt: skip
        assert {process["role"]: process["device"] for process in processes} == {
            "buffer": "", "trainer": name, "rollout": name,
        }  # fmt: skip
        daemon.wait_step(2)
        for role in ("trainer", "rollout"):
            assert total(daemon.metrics(), "rlhfd_device_info", role=role, device=name) == 1
            assert total(daemon.metrics(), "rlhfd_torch_memory_bytes", role=role, state="allocated") > 0
        assert daemon.wait() == 0
    assert "roles are started without it" not in daemon.errors, "the forkserver opens no GPU"
    assert len(re.findall(r"planned_bytes=\d+", daemon.errors)) == 1, "a step has the memory that was planned"
    assert not daemon.shm_dir.exists()


def test_a_process_that_has_asked_cuda_for_its_devices_serves_no_forks():
    program = (
        "import torch; torch.cuda.is_available()\n"
        "from pipeline.runtime.forkserver_process import forks_badly\n"
        "print(forks_badly())\n"
    )

    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"


def test_page_locked_memory_that_cuda_refuses_is_a_warning_and_the_card_goes_on(caplog):
    driver = CudaDriver()

    assert not driver.register(1 << 46, 1 << 16), "no memory is there"
    assert not driver.register(1 << 46, 1 << 16)

    assert caplog.text.count("no page-locked memory") == 1
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_slots_are_page_locked_by_their_first_copy_and_given_back():
    given = {"actor.w": torch.arange(1 << 20, device="cuda", dtype=torch.float32)}
    target = {"actor.w": torch.zeros(1 << 20, device="cuda")}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "weights"
        publisher = WeightsPublisher(path, given)
        reader = WeightsReader(path)
        for version in (1, 2, 3):
            publisher.publish(version, given)
            reader.fetch(target)

        slots = [mapping.slot(slot) for mapping in (publisher, reader._mapping) for slot in range(3)]
        views = [slot.views["actor.w"] for slot in slots]
        assert all(view.is_pinned() for view in views)
        assert torch.equal(target["actor.w"], given["actor.w"])
        reader.close()
        publisher.close()

        assert not any(view.is_pinned() for view in views)
        successor = WeightsPublisher(path, given)
        successor.publish(4, given)
        assert any(slot.views["actor.w"].is_pinned() for slot in map(successor.slot, range(3)))
        successor.close()


@pytest.mark.parametrize("publisher_device", ["cuda", "cpu"])
@pytest.mark.parametrize("worker_device", ["cuda", "cpu"])
def test_weights_travel_between_any_devices_whole(tmp_path, publisher_device, worker_device):
    """Tensors that begin and end within a block, so that hashing and copies overlap."""
    draws = torch.Generator().manual_seed(0)
    given = {f"actor.{i}": torch.randn(6_000_001, generator=draws).to(publisher_device) for i in range(12)}
    target = {name: torch.zeros(tensor.shape, device=worker_device) for name, tensor in given.items()}
    publisher = WeightsPublisher(tmp_path / "weights", given)
    reader = WeightsReader(tmp_path / "weights")

    published = publisher.publish(1, given)
    fetched = reader.fetch(target)

    assert fetched == published
    for name, tensor in given.items():
        assert torch.equal(target[name].cpu(), tensor.cpu()), name
    again = publisher.publish(2, {name: tensor.cpu() for name, tensor in given.items()})
    assert again.fingerprint == published.fingerprint
    reader.close()
    publisher.close()


@pytest.fixture
def captures(monkeypatch):
    """Weak references to the graphs of the model's passes, in the order of their captures."""
    made, capture = [], CudaDevice.capture

    def noted(self, step, pool):
        graph = capture(self, step, pool)
        # The graph that keeps a pool is of no step, and others sample.
        if isinstance(step, functools.partial) and step.func.__name__ == "_run":
            made.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(CudaDevice, "capture", noted)
    return made


@torch.no_grad()
@pytest.mark.parametrize("ends", [(tiny.EOS,), tuple(range(1, 12))], ids=["some end", "most end"])
@pytest.mark.parametrize(
    "build",
    [long_llama, *(functools.partial(model, window=each) for model in (tiny.mistral, tiny.gemma3) for each in (3, 80))],
    ids=["llama", "mistral 3", "mistral 80", "gemma3 3", "gemma3 80"],
)
def test_tokens_of_cuda_graphs_are_those_of_the_cpu(build, ends, captures, caplog):
    """Greedy, past several changes of room and of rows, each of which is another graph; some layers slide a window."""
    prompts = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
    mask = (prompts != 0).long()
    greedy = Sampling(max_length=204, pad_token_id=tiny.PAD, eos_token_ids=ends, do_sample=False)
    expected = TransformersGenerator(build()).generate(prompts, mask, greedy, group_size=4)
    engine = TransformersGenerator(build().cuda())

    for _ in range(2):
        graphs = engine.generate(prompts, mask, greedy, group_size=4)

        assert torch.equal(graphs.sequences, expected.sequences)
        torch.testing.assert_close(graphs.log_probs, expected.log_probs, atol=1e-4, rtol=0)
    assert captures and "no CUDA graph" not in caplog.text


def test_a_graph_computes_with_weights_that_were_replaced_in_place():
    actor, other = tiny.llama().cuda(), tiny.llama(seed=9).cuda()
    prompts = torch.tensor([[7, 3, 11, 2]])
    greedy = Sampling(max_length=60, pad_token_id=tiny.PAD, do_sample=False)
    engine = TransformersGenerator(actor)
    engine.generate(prompts, torch.ones_like(prompts), greedy)
    actor.load_state_dict(other.state_dict())

    after = engine.generate(prompts, torch.ones_like(prompts), greedy)

    expected = TransformersGenerator(other).generate(prompts, torch.ones_like(prompts), greedy)
    assert torch.equal(after.sequences, expected.sequences)


def test_a_model_that_reads_back_from_the_gpu_is_found_before_the_capture_and_leaves_the_worker_whole(caplog):
    model = tiny.llama().cuda()
    model.model.layers[1].register_forward_pre_hook(lambda module, words: words[0].sum().item() and None)
    prompts = torch.tensor([[7, 3, 11, 2]])
    greedy = Sampling(max_length=60, pad_token_id=tiny.PAD, eos_token_ids=(), do_sample=False)
    expected = TransformersGenerator(tiny.llama()).generate(prompts, torch.ones_like(prompts), greedy)
    engine, stream = TransformersGenerator(model), torch.cuda.current_stream()

    made = [engine.generate(prompts, torch.ones_like(prompts), greedy) for _ in range(2)]

    assert all(torch.equal(responses.sequences, expected.sequences) for responses in made)
    assert caplog.text.count("no CUDA graph of this model") == 1
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.empty_cache()


def assert_tokens_of_the_cpu(engine, *, rows=4, max_length=60):
    prompts = torch.randint(2, tiny.VOCABULARY_SIZE, (rows, 7), generator=torch.Generator().manual_seed(rows))
    greedy = Sampling(max_length=max_length, pad_token_id=tiny.PAD, eos_token_ids=(), do_sample=False)
    made = engine.generate(prompts, torch.ones_like(prompts), greedy)
    expected = TransformersGenerator(long_llama()).generate(prompts, torch.ones_like(prompts), greedy)
    assert torch.equal(made.sequences, expected.sequences)


@torch.no_grad()
def test_memory_that_was_released_is_given_back_and_graphs_are_captured_again(captures, caplog):
    engine = TransformersGenerator(long_llama().cuda())
    assert_tokens_of_the_cpu(engine)
    assert len(captures) == 1
    reserved = torch.cuda.memory_reserved()

    release_memory()

    assert captures[0]() is None and torch.cuda.memory_reserved() < reserved
    for _ in range(2):
        assert_tokens_of_the_cpu(engine)
    assert len(captures) == 2 and captures[1]() is not None
    assert "no CUDA graph" not in caplog.text


@torch.no_grad()
def test_growth_captures_anew_each_time_and_the_graphs_are_replayed(captures, caplog):
    engine = TransformersGenerator(long_llama().cuda())
    for count, rows in enumerate((1, 4, 16), start=1):
        assert_tokens_of_the_cpu(engine, rows=rows)
        assert_tokens_of_the_cpu(engine, rows=rows)
        assert len(captures) == count
        assert [graph() is not None for graph in captures] == [False] * (count - 1) + [True]

    assert "no CUDA graph" not in caplog.text


@torch.no_grad()
def test_engines_of_one_process_have_graphs_of_their_own_whatever_becomes_of_another(captures, caplog):
    """One is dropped, one fails a capture: the third replays its graph, and a fourth captures."""
    first, failing, third = (TransformersGenerator(long_llama().cuda()) for _ in range(3))
    for engine in (first, third):
        assert_tokens_of_the_cpu(engine)
    assert len(captures) == 2
    del first, engine
    gc.collect()
    torch.cuda.empty_cache()
    assert captures[0]() is None
    failing._model.model.layers[1].register_forward_pre_hook(lambda *_: torch.cuda.current_stream().synchronize())
    assert_tokens_of_the_cpu(failing)
    assert caplog.text.count("no CUDA graph of this model") == 1

    assert_tokens_of_the_cpu(third)
    assert len(captures) == 2 and captures[1]() is not None
    assert_tokens_of_the_cpu(TransformersGenerator(long_llama().cuda()))
    assert_tokens_of_the_cpu(failing)

    assert len(captures) == 3
    assert caplog.text.count("no CUDA graph of this model") == 1
    assert torch.isfinite(torch.rand(8, device="cuda")).all()


@torch.no_grad()
def test_batches_of_other_rows_and_widths_replay_the_graphs_of_their_buckets(captures):
    greedy = Sampling(max_length=204, pad_token_id=tiny.PAD, eos_token_ids=(), do_sample=False)
    engine, plain = TransformersGenerator(long_llama().cuda()), TransformersGenerator(long_llama())
    counts = []

    for rows, width in ((4, 7), (4, 7), (3, 5), (4, 2), (3, 64)):
        prompts = torch.randint(2, tiny.VOCABULARY_SIZE, (rows, width), generator=torch.Generator().manual_seed(rows))
        made = engine.generate(prompts, torch.ones_like(prompts), greedy, group_size=4)
        expected = plain.generate(prompts, torch.ones_like(prompts), greedy, group_size=4)
        assert torch.equal(made.sequences, expected.sequences)
        torch.testing.assert_close(made.log_probs, expected.log_probs, atol=1e-4, rtol=0)
        counts.append(len(captures))

    # Rooms of 128, 256 and 320 columns: the first batch makes the memory larger as it goes, so that only its last graph
    # is left, and the second one captures the two others again.
    assert counts == [3, 5, 5, 5, 5]
    torch.cuda.synchronize()


@torch.no_grad()
@pytest.mark.parametrize(
    "more",
    [
        {}, {"temperature": 0.7, "eos_token_ids": (1, 5)}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1},
        {"stop_sequences": ((4, 4), (3, 8, 3))}, {"do_sample": False},
    ],
)  # fmt: skip
def test_a_graph_samples_the_tokens_and_log_probs_of_the_same_kernels_outside(more, caplog):
    sampling = Sampling(max_length=204, pad_token_id=tiny.PAD, seed=7, **more)
    prompts = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
    inside, outside = (TransformersGenerator(long_llama().cuda()) for _ in range(2))
    outside._sampling_capture = GraphCapture(None)

    for _ in range(3):
        made, expected = (
            engine.generate(prompts, prompts != 0, sampling, group_size=4) for engine in (inside, outside)
        )

        assert torch.equal(made.sequences, expected.sequences)
        assert torch.equal(made.log_probs, expected.log_probs)
    decoder = inside._decoder
    assert all(steps.graph is not None for bucket in decoder._buckets.values() for steps in bucket.sampling.values()
               if steps.count > 3)  # fmt: skip
    assert "no CUDA graph" not in caplog.text


def test_a_capture_that_fails_leaves_streams_allocator_and_generator_whole(caplog):
    """No read of a tensor, so the trial passes: only the capture refuses a wait for the stream."""
    model = tiny.llama().cuda()
    model.model.layers[1].register_forward_pre_hook(lambda *_: torch.cuda.current_stream().synchronize())
    prompts = torch.tensor([[7, 3, 11, 2]])
    greedy = Sampling(max_length=60, pad_token_id=tiny.PAD, eos_token_ids=(), do_sample=False)
    expected = TransformersGenerator(tiny.llama()).generate(prompts, torch.ones_like(prompts), greedy)
    engine, stream = TransformersGenerator(model), torch.cuda.current_stream()
    torch.manual_seed(4)
    draws = torch.rand(8, device="cuda")
    torch.manual_seed(4)

    made = [engine.generate(prompts, torch.ones_like(prompts), greedy) for _ in range(2)]

    assert all(torch.equal(responses.sequences, expected.sequences) for responses in made)
    assert caplog.text.count("no CUDA graph of this model") == 1
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    assert torch.equal(torch.rand(8, device="cuda"), draws)


@torch.no_grad()
def test_logits_in_float32_lower_the_spread_of_an_unchanged_policy():
    model = confident(hidden_size=256, intermediate_size=512, num_hidden_layers=4).cuda()
    device = torch.device("cuda", 0)
    sequences, mask = (tensor.cuda() for tensor in probed_rows())
    exact, before = exact_log_probs(model, sequences, mask, 16), log_prob_spread(model, TOKENS, device)
    assert (action_log_probs(model, sequences, mask, 16) - exact).abs().max() > 0.03

    compute_in_float32(model)

    torch.testing.assert_close(
        action_log_probs(model, sequences, mask, 16).double(),
        exact_log_probs(model, sequences, mask, 16),
        atol=2e-2,
        rtol=0,
    )
    assert log_prob_spread(model, TOKENS, device) <= before


def test_gradients_pass_through_logits_in_float32():
    plain, model = confident().cuda(), confident().cuda()
    compute_in_float32(model)
    sequences, mask = (tensor.cuda() for tensor in probed_rows())
    for each in (plain, model):
        action_log_probs(each, sequences, mask, 16).mean().backward()

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).float().norm() <= 0.1 * theirs.grad.float().norm()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(("side", "window"), [("left", None), ("right", None), ("left", 50)])
def test_gradients_of_a_padded_batch_in_16_bits_are_those_of_the_packed_one(side, window, checkpointed):
    """Under torch's own order of kernels, in which cuDNN's comes first; its gradients of padded rows are NaN."""
    assert torch.backends.cuda.cudnn_sdp_enabled() and "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    padded, packed = (qwen_in_16_bits(window).cuda() for _ in range(2))
    checkpoint_activations([padded], padded.device, checkpointed)
    assert prepare_packing([packed], packed.device, None)
    batch = [tensor.cuda() for tensor in rows_padded_on_the(side)]

    assert_close_gradients(padded, packed, *batch)

    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_rows_with_images_are_packed_on_the_card_as_they_are_padded():
    padded, packed = (tiny_vision.model().bfloat16().cuda() for _ in range(2))
    assert prepare_packing([packed], packed.device, None)
    made = tiny_vision.prompts([8, (1, 4, 6), 9], [10, (1, 4, 4), 11, (1, 2, 8), 13, 14], [9] * 40)
    vision = tiny_vision.vision_of(made)
    answers = torch.arange(3 * 20).reshape(3, 20) % 20 + 7
    sequences = torch.cat([made["input_ids"], answers], dim=1).cuda()
    mask = functional.pad(made["attention_mask"], (0, 20), value=1).cuda()

    expected = action_log_probs(padded, sequences, mask, 20, vision=vision)
    found, _ = log_probs_by_packing(packed, sequences, mask, mask[:, -20:] != 0, vision=vision)

    assert (found - expected).abs().mean() < 0.02
    found.mean().backward()
    expected.mean().backward()
    for ours, theirs in zip(packed.parameters(), padded.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert (ours.grad - theirs.grad).float().norm() <= 0.1 * theirs.grad.float().norm()


def qwen_in_16_bits(window=None):
    """A Qwen2; with a window its last two layers slide it."""
    torch.manual_seed(0)
    slides = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    config = Qwen2Config(
        vocab_size=1_024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, **slides,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).bfloat16().eval()


def rows_padded_on_the(side):
    """Return tokens, mask and the mask of the last 180 columns' actions, after 4 tokens of each row."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 193, (16, 1), generator=draws)
    columns = torch.arange(192)
    mask = columns >= 192 - lengths if side == "left" else columns < lengths
    actions = mask & (mask.cumsum(dim=1) > 4)
    sequences = torch.randint(2, 1_024, mask.shape, generator=draws).masked_fill(~mask, tiny.PAD)
    return sequences, mask.long(), actions[:, -180:]


def assert_close_gradients(padded, packed, sequences, mask, actions):
    values = action_log_probs(padded, sequences, mask, actions.shape[1])[actions]
    values.mean().backward()
    expected = log_probs_by_packing(packed, sequences, mask, actions)[0][actions]
    expected.mean().backward()
    assert (values - expected).abs().mean() < 0.01
    for ours, theirs in zip(padded.parameters(), packed.parameters(), strict=True):
        assert ours.grad.isfinite().all()
        assert (ours.grad - theirs.grad).float().norm() <= 0.05 * theirs.grad.float().norm()


def test_widths_on_the_card_are_multiples_of_64():
    actor, widths = tiny.llama().cuda(), []
    actor.base_model.register_forward_pre_hook(
        lambda module, words, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    maker = NaiveExperienceMaker(
        actor, None, lambda **row: torch.arange(len(row["input_ids"]), dtype=torch.float32), actor, Tokenizer(),
        use_grpo=True, num_generation=4,
    )  # fmt: skip
    prompts = torch.tensor([[tiny.PAD, 5, 6], [7, 8, 9]])

    maker.make_experience(prompts, (prompts != tiny.PAD).long(), max_length=12, seed=1)

    # Steps have one column, and the test of the model's head two.
    assert {width for width in widths if width > 2} == {64}


def test_a_step_that_runs_out_of_the_cards_memory_is_taken_in_halves():
    """The limit is set so that the batch does not fit, and half of it does; no width is rounded up."""
    whole, cut = (new_learner("grpo") for _ in range(2))
    experience = experience_for(whole, "grpo")
    assert experience.sequences.numel() == 88
    expected = whole.update([experience])
    told = Told()
    trainer = TRAINER.model_copy(update={"micro_batch_size": 8})
    card = Learner(trainer, "grpo", cut._actor.cuda(), kl_coef=0.05, telemetry=told, width=1)
    hog = []

    def grab(module, words, keywords):
        if keywords["input_ids"].numel() > 44:
            hog.append(
                torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
            )

    card._actor.base_model.register_forward_pre_hook(grab, with_kwargs=True)
    stats = card.update([experience])

    assert told.counted["out_of_memory"] == ["pass"]
    assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
    assert stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)


def kernels(call):
    """Return the number of kernels that a call launches on the card, and its result."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        result = call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events), result


@pytest.mark.parametrize("packed", [True, False])
def test_compiled_layers_launch_a_part_of_the_kernels_and_give_the_same(packed):
    """Of a model left to itself; a trial whose numbers differ would leave it as it is, and the count as well."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    device = next(model.parameters()).device
    if packed:
        assert prepare_packing([model], device)
    checkpoint_activations([model], device, True)
    rows, (sequences, mask) = flat(90, 200, 300, device=device), block(6, 192)

    def step():
        if packed:
            found = log_probs_of_rows(model, rows)[0]
        else:
            found = action_log_probs(model, sequences.to(device), mask.to(device), 100)
        return found.detach(), torch.autograd.grad(found.mean(), list(model.parameters()), allow_unused=True)

    step()
    before, (expected, gradients) = kernels(step)

    assert compile_layers({model: Uses(packed, trained=True, tokens=24_000)}, device)

    step()
    after, (found, compiled) = kernels(step)
    if packed:
        # Beyond the bounds by which Inductor chooses the kernels of this model.
        log_probs_of_rows(model, flat(*[500] * 48, device=device))[0].sum().backward()
    assert not vars(model.model.layers[0])["rlhfd_code"].missed
    assert after < 0.7 * before, (after, before)
    assert (found - expected).abs().mean() < 0.02
    for mine, its in zip(compiled, gradients, strict=True):
        if its is not None:
            assert (mine.float() - its.float()).norm() < 0.1 * its.float().norm() + 1e-6


def test_a_norm_is_one_kernel_of_a_pass_and_computes_as_before():
    norm = LlamaRMSNorm(1024).to("cuda", torch.bfloat16)
    norm.weight.data.normal_(1.0, 0.3)
    rows = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        result = norm(rows)
        return result, *torch.autograd.grad(result.float().square().mean(), [rows, norm.weight])

    step()
    before, expected = kernels(step)

    assert fuse_norms([torch.nn.ModuleList([norm])]) == 1

    step()
    after, found = kernels(step)
    assert after <= before - 14, (before, after)
    with torch.no_grad():
        norm(rows)
        assert kernels(lambda: norm(rows))[0] == 1
    for mine, its in zip(found, expected, strict=True):
        assert (mine.float() - its.float()).norm() < 0.02 * its.float().norm()


def test_queries_and_keys_are_rotated_by_six_kernels_a_layer_in_place_of_ten(monkeypatch):
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
    q, k, cos, sin = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((8, 14, 1, 64), (8, 2, 1, 64), (8, 1, 64), (8, 1, 64))
    )

    def call():
        return modeling_qwen2.apply_rotary_pos_emb(q, k, cos, sin)

    call()
    before, expected = kernels(call)

    assert fuse_rotary([qwen_in_16_bits()]) == 1

    # The sign of the sine is set once a pass.
    call()
    after, found = kernels(call)
    assert (before, after) == (10, 6)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=2**-5, rtol=2**-6)


def test_the_trial_of_a_card_finds_compiled_layers_faster_and_keeps_them():
    config = Qwen2Config(
        vocab_size=64, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    device = next(model.parameters()).device
    assert prepare_packing([model], device)

    assert compile_layers({model: Uses(packed=True, trained=True, tokens=8_000)}, device, only_if_faster=True) == 8


def test_the_seconds_of_a_step_count_for_the_phase_that_computes():
    actor = tiny.llama().cuda()
    # Half a second or more of the device's time, which no call of the pass waits for.
    actor.model.layers[0].register_forward_hook(lambda *_: torch.cuda._sleep(1_500_000_000))
    learner = Learner(TrainerConfig(), "grpo", actor)
    batch = made_up(4, ppo=False)
    batch.sequences %= actor.config.vocab_size
    batch.to_device(torch.device("cuda"))
    # The first step loads the kernels.
    learner.update([batch])

    stats = learner.update([batch])

    assert stats.forward_s > 0.5 > stats.backward_s + stats.reduce_s


def waits(call):
    """Return the number of times that the host waits for the card during a call, as torch counts them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in told)


def test_a_micro_batch_more_is_no_wait_for_the_card_more():
    counts = []
    for rows in (8, 2):
        settings = TrainerConfig(packing=True, micro_batch_size=rows)
        learner = Learner(settings, "grpo", tiny.llama().cuda().bfloat16(), kl_coef=0.05)
        batch = made_up(8, ppo=False)
        batch.sequences %= learner._actor.config.vocab_size
        batch.to_device(torch.device("cuda"))
        # The first step loads kernels and tests the model's head.
        learner.update([batch])
        counts.append(waits(lambda learner=learner, batch=batch: learner.update([batch])))

    assert counts[0] == counts[1] > 0


def test_nccl_ranks_end_within_seconds_of_an_error_of_one(tmp_path, task):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = loaded_first(tmp_path, FAILING.format(once=str(tmp_path / "has-failed")))
    with Daemon(tmp_path, *TWO_RANKS, "daemon.hang_timeout_s=0", task=task, environment=environment) as daemon:
        daemon.wait_logged("ValueError: the card fell off the bus")
        assert daemon.wait() == 0, daemon.errors
