"""Images through the vLLM engine: from prompt to the engine's process, and what the real vLLM makes of them."""

import copy
import dataclasses
import os

import msgspec
import pytest
import torch

from pipeline.errors import FieldError
from pipeline.models.log_probs import action_log_probs
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.rollout.generation.interface import EngineCounts, EngineLoad, Request, Sampling
from pipeline.rollout.generation.vllm import engine as engines
from pipeline.rollout.generation.vllm import images, wire
from pipeline.rollout.generation.vllm.engine import VllmEngine
from pipeline.rollout.generation.vllm.images import sight_of
from pipeline.runtime.link import Link
from tests.rollout.generation.vllm.models import begin, finish, small_vl
from tests.support import tiny, tiny_vision
from tests.support.vllm_engines import forked_engine, said_by_a_fork

# The first one is longer than a block of the cache.
ONE, TWO, NONE = [20, (1, 24, 28), 21], [22, (1, 4, 4), 23, (1, 2, 6), 24, 25], [20, 21, 22]
MAX_LENGTH = 400


def requests(*rows, seed=0, group_size=3, room=12):
    """A request for each row of token ids and grids, as a worker submits them: the prompt with its own pixels."""
    made = tiny_vision.prompts(*rows, seed=seed)
    vision = tiny_vision.vision_of(made)
    sampling = Sampling(max_length=0, pad_token_id=tiny_vision.PAD, seed=5)
    return [
        Request(row, ids[mask != 0], group_size, room, sampling, row * group_size, vision.rows([row]))
        for row, (ids, mask) in enumerate(zip(made["input_ids"], made["attention_mask"], strict=True))
    ]


def settings(folder, sight):
    return wire.Settings(
        str(folder), dtype="float32", on_cpu=True, max_length=MAX_LENGTH, max_rows=12, cache_bytes=64 << 20,
        log_level="info", log_json=False, title="test vllm", sight=sight,
    )  # fmt: skip


# The way to the engine's process, whose end the test holds.

SIGHT = wire.Sight("qwen2_vl", tiny_vision.IMAGE, tiny_vision.MERGE)


class Child:
    """An engine's process that takes no step by itself."""

    pid = 0

    def __init__(self, end):
        self.link = Link(end, wire.orders)
        self.link.send(wire.Ready(1000, len(tiny_vision.SYMBOLS)))

    def orders(self):
        return self.link.receive(0.0)

    def report(self, taken):
        self.link.send(wire.Stepped([], taken, EngineLoad(0, 0, counts=EngineCounts())))

    def kill(self):
        self.link.close()

    def wait(self, timeout_s=None):
        return 0


@pytest.fixture
def apart(monkeypatch):
    """A function of the model's sight, for an engine and its process."""
    made = []

    def new(sight):
        monkeypatch.setattr(engines, "_executed", lambda theirs, settings, variables: Child(theirs.dup()))
        made.append(VllmEngine(settings("nowhere", sight)))
        child = made[-1]._process.child
        assert child.orders() == [settings("nowhere", sight)]
        return made[-1], child

    yield new
    for engine in made:
        engine.close()


def open_images():
    """The descriptors of images that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.islink(link) and "rlhfd-images" in os.readlink(link)]


def test_pixels_go_once_a_request_and_are_let_go_when_it_is_taken(apart):
    engine, child = apart(SIGHT)
    asked = requests(ONE, TWO, NONE, group_size=64)

    for request in asked:
        engine.submit(request)
    of_one, of_two, of_none = child.orders()

    assert len(of_one.seeds) == 64 and of_none.images is None
    assert len(open_images()) == 2, "one for all responses of a request"
    assert (of_one.images.grids, of_one.images.spots) == ([(1, 24, 28)], [(2, 168)])
    assert (of_two.images.grids, of_two.images.spots) == ([(1, 4, 4), (1, 2, 6)], [(2, 4), (9, 3)])
    for order, request in ((of_one, asked[0]), (of_two, asked[1])):
        places = [range(start, start + length) for start, length in order.images.spots]
        assert [place for run in places for place in run] == [
            place for place, token in enumerate(order.prompt) if token == tiny_vision.IMAGE
        ]
        received = images.pixels_of(order.images)
        assert [len(part) for part in received] == [time * rows * width for time, rows, width in order.images.grids]
        assert torch.equal(torch.cat(received), request.vision.pixel_values[0])

    child.report(1)
    engine.step()
    assert len(open_images()) == 2, "the second one here, and as the other end has mapped it"
    engine.close()
    assert torch.equal(torch.cat(received), asked[1].vision.pixel_values[0])
    del received
    assert open_images() == []


def test_equal_images_have_equal_hashes_and_others_have_not():
    def hashes(*row, seed=0):
        (request,) = requests([*row], seed=seed)
        descriptor, message = images.put(request.prompt_ids.tolist(), request.vision, SIGHT)
        os.close(descriptor)
        return message.hashes

    wide, tall, other = hashes(20, (1, 4, 6)), hashes(20, (1, 6, 4)), hashes(20, (1, 4, 6), seed=1)

    assert hashes(21, (1, 4, 6), 22) == wide
    assert len({*wide, *tall, *other, *hashes(20, (1, 2, 12))}) == 4, "equal pixels of another shape are another image"
    assert len({*hashes(20, (1, 4, 6), 21, (1, 4, 6))}) == 2


def test_what_vllm_takes_no_images_of_is_refused_and_nothing_stays(apart):
    engine, child = apart(SIGHT)
    (video,) = requests([20, (2, 4, 4), 21])
    (both,) = requests([20, (2, 4, 4), 21, (1, 4, 4)])
    (image,) = requests([20, (1, 4, 6), 21])
    joined = torch.tensor([20, *[tiny_vision.IMAGE] * 12])
    (two,) = requests([20, (1, 4, 6), (1, 4, 6)])

    for request, problem in (
        (video, 'rollout.engine "vllm" takes no videos; the prompt has one'),
        (both, 'rollout.engine "vllm" takes no videos; the prompt has one'),
        (with_prompt(image, image.prompt_ids[:-3]), "has runs of .5. image tokens, its images ask for .6."),
        (with_prompt(two, joined), r"has runs of .12. image tokens, its images ask for .6, 6."),
    ):
        with pytest.raises(FieldError, match=problem):
            engine.submit(request)
    blind, _ = apart(None)
    with pytest.raises(FieldError, match="takes text alone with this model; the prompt has images"):
        blind.submit(image)

    assert child.orders() == [] and open_images() == []
    assert engine.load.waiting == 0
    engine.submit(image)


def with_prompt(request, prompt):
    return dataclasses.replace(request, prompt_ids=prompt)


def test_the_sight_of_a_model_is_that_of_its_configuration():
    assert sight_of(small_vl("qwen2_vl", 0)) == SIGHT
    other = tiny_vision.relative("qwen3_vl")
    assert sight_of(other) == wire.Sight("qwen3_vl", tiny_vision.IMAGE, tiny_vision.MERGE)
    other.config.model_type = "glm4v"
    assert sight_of(other) is None, "not tried"
    assert sight_of(tiny.llama(0)) is None


# The real vLLM, in one process for each kind of model, from start to end.

KINDS = ["qwen2_vl", *(pytest.param(kind, marks=pytest.mark.variant) for kind in ("qwen2_5_vl", "qwen3_vl"))]


@pytest.fixture(scope="module", params=KINDS)
def seeing(request, tmp_path_factory, forkserver):
    """The kind of a model, and its engine with the weights of seed 0."""
    folder = tmp_path_factory.mktemp("model")
    model = small_vl(request.param, 0)
    model.save_pretrained(folder)
    made = forked_engine(settings(folder, sight_of(model)), forkserver)
    yield request.param, made
    made.close()


def run(engine, asked):
    for one in asked:
        engine.submit(one)
    return finish(engine, len(asked))


@torch.no_grad()
def expected(model, request, response):
    """The trainer's log-probs."""
    row = torch.cat([request.prompt_ids, response.token_ids])[None]
    return action_log_probs(model, row, torch.ones_like(row), len(response.token_ids), vision=request.vision)[0]


def assert_of(model, asked, ended, version):
    for request in asked:
        assert len(ended[request.key]) == request.group_size
        for response in ended[request.key]:
            assert [span.version for span in response.spans] == [version]
            torch.testing.assert_close(response.log_probs, expected(model, request, response), rtol=0, atol=1e-4)


def with_another_encoder(model):
    """The model with other weights where it sees, and there alone."""
    other, noise = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.model.visual.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    return other


@pytest.mark.vllm
@pytest.mark.integration
def test_log_probs_with_images_are_the_trainers_through_updates_of_the_encoder(seeing, tmp_path):
    kind, engine = seeing
    first, second = small_vl(kind, 0), small_vl(kind, 1)
    third = with_another_encoder(second)
    asked, with_other_pixels = requests(ONE, TWO, NONE), requests(ONE, TWO, NONE, seed=1)
    all_ended = []

    def check(model, requests, version):
        all_ended.append(run(engine, requests))
        assert_of(model, requests, all_ended[-1], version)

    check(first, asked, -1)
    check(first, with_other_pixels, -1)
    engine.update_weights(second.state_dict(), 1)
    check(second, asked, 1)
    tensors = flatten(actor=third.state_dict())
    publisher = WeightsPublisher(tmp_path / "weights", tensors, slots=2)
    publisher.publish(2, tensors)
    engine.fetch_weights(tmp_path / "weights")
    check(third, asked, 2)
    publisher.publish(3, flatten(actor=first.state_dict()))
    engine.fetch_weights(tmp_path / "weights")
    check(first, asked, 3)
    publisher.close()

    assert tokens(all_ended[0][0]) == tokens(all_ended[4][0]) != tokens(all_ended[1][0]), "pixels decide"
    sampled = [
        token for ended in all_ended for responses in ended.values() for row in tokens(responses) for token in row
    ]
    assert tiny_vision.IMAGE in sampled, "a sampled image token is of no image"
    assert engine.load.counts.prefix_hits >= 2 * 128, "the second and third of a group find the first one's block"


def tokens(responses):
    return [response.token_ids.tolist() for response in responses]


@pytest.mark.vllm
@pytest.mark.integration
def test_an_update_in_flight_looks_at_the_images_again(seeing):
    kind, engine = seeing
    first, second = small_vl(kind, 0), with_another_encoder(small_vl(kind, 0))
    engine.update_weights(first.state_dict(), 4)
    asked = requests(ONE, TWO, room=200)
    begin(engine, *asked)

    engine.update_weights(second.state_dict(), 5)
    ended = finish(engine, 2)

    for request in asked:
        for response in ended[request.key]:
            before, after = response.spans
            assert (before.version, after.version, after.end) == (4, 5, 200) and 0 < before.end == after.start < 200
            of_each = [expected(model, request, response) for model in (first, second)]
            joined = torch.cat([of_each[0][: before.end], of_each[1][after.start :]])
            torch.testing.assert_close(response.log_probs, joined, rtol=0, atol=1e-4)


KEPT = """
import msgspec
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.vllm import images, memory, wire
from pipeline.rollout.generation.vllm.core import Core
from tests.rollout.generation.vllm import test_images
from tests.rollout.generation.vllm.models import small_vl

def kept(core):
    return core._engine.collective_rpc(lambda worker: len(worker.model_runner.encoder_cache))[0]

core = Core(msgspec.json.decode(DESCRIBED, type=wire.Settings))
found = []
for version, row in enumerate(([20, (1, 4, 6), 21], [20, (1, 6, 4), 21], [20, (1, 4, 4), (1, 2, 6)])):
    (request,) = test_images.requests(row)
    prompt = request.prompt_ids.tolist()
    descriptor, message = images.put(prompt, request.vision, test_images.SIGHT)
    greedy = Sampling(max_length=0, pad_token_id=0, do_sample=False)
    core.submit(wire.Submit(version, prompt, [5], 2, greedy, True, message))
    while core.busy:
        core.step()
    found.append(kept(core))
    descriptor, places = memory.put("rlhfd-actor", small_vl("qwen2_vl", version).state_dict())
    core.take(memory.path_of(descriptor), places, version)
    found.append(kept(core))
say(f"kept {found}")
"""


@pytest.mark.vllm
@pytest.mark.integration
def test_vllm_keeps_nothing_of_the_images_of_a_version_before(tmp_path, forkserver):
    """The scheduler forgets them; the model's runner would keep them for good."""
    model = small_vl("qwen2_vl", 0)
    model.save_pretrained(tmp_path)
    described = msgspec.json.encode(settings(tmp_path, sight_of(model))).decode()

    said = said_by_a_fork(KEPT.replace("DESCRIBED", repr(described)), forkserver)

    assert said == "kept [1, 0, 1, 0, 2, 0]\n"
