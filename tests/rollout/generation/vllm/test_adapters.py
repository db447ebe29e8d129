"""LoRA adapters in the real vLLM: each version replaces those before it, and only adapters of its model are taken."""

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import RlhfdError, WeightsError, WeightsMismatchError
from pipeline.models.lora import adapt, adapter_of
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.rollout.generation.interface import Span
from pipeline.rollout.generation.vllm.engine import lora_of
from tests.rollout.generation.vllm.models import begin, finish, log_probs_of, small_llama
from tests.rollout.generation.vllm.test_engine import PROMPT, ids, request, run, settings
from tests.support.daemon import is_alive, wait_until
from tests.support.vllm_engines import forked_engine

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

# A part of a fused layer, a whole fused one, and one by itself. vLLM's slots have ranks of their own: 8 is the next.
TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "o_proj"]
SETTINGS = {"lora_rank": 3, "lora_alpha": 7, "lora_targets": TARGETS, "lora_kind": "rslora"}
LORA = Config.model_validate({"model": SETTINGS}).model


def adapted(seed, targets=TARGETS):
    """The base with adapters of values that change each log-prob."""
    model = adapt(small_llama(0), LORA.model_copy(update={"lora_targets": targets}), seed=0)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter_of(model).values():
            tensor.normal_(0.0, 0.2, generator=draws)
    return model


def shared_memory(folder, *versions):
    """A weights file with versions of adapters, and its publisher."""
    tensors = [flatten(actor=adapter_of(model)) for model in versions]
    publisher = WeightsPublisher(folder / "weights", tensors[0], slots=3)
    for version, of in enumerate(tensors, 1):
        publisher.publish(version, of)
    return publisher


def assert_of(responses, model, version):
    for response in responses:
        assert response.spans == (Span(version, 0, len(response.token_ids)),)
        expected = log_probs_of(model, PROMPT, response.token_ids)
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, forkserver):
    folder = tmp_path_factory.mktemp("base")
    small_llama(0).save_pretrained(folder)
    made = forked_engine(settings(folder, lora=lora_of(adapted(0), LORA.lora_rank)), forkserver)
    yield made
    made.close()


def test_vllm_is_told_the_layers_and_the_scale_of_the_adapters():
    assert lora_of(small_llama(0), 0) is None
    some = lora_of(adapted(0), 3)
    assert (some.rank, some.targets) == (3, sorted(TARGETS))
    assert some.alpha / some.rank == pytest.approx(7 / 3**0.5)
    every = lora_of(adapted(0, "all-linear"), 3)
    assert every.targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_adapters_are_in_force_by_their_version_alone_and_only_whole_ones_of_the_model(engine, tmp_path):
    """One engine from its start to its end."""
    first, second = adapted(1), adapted(2)
    assert_of(run(engine, request())[0], small_llama(0), -1)

    publisher = shared_memory(tmp_path, first, second)
    path = tmp_path / "weights"
    assert engine.fetch_weights(path) == (2, 0)
    of_second = run(engine, request())[0]
    assert_of(of_second, second, 2)
    assert engine.fetch_weights(path, (1, 0)) == (1, 0)
    assert_of(run(engine, request())[0], first, 1)
    engine.update_weights(adapter_of(second), 7)
    again = run(engine, request())[0]
    assert_of(again, second, 7)
    assert ids(again) == ids(of_second)

    # In flight: the tokens stay, and those that follow are of the new version given all before them.
    begin(engine, request(room=380, eos_token_ids=()))
    engine.fetch_weights(path, (1, 0))
    for response in finish(engine, 1)[0]:
        before, after = response.spans
        assert (before.version, after.version, after.end) == (7, 1, 380) and before.end == after.start
        of_each = [log_probs_of(model, PROMPT, response.token_ids) for model in (second, first)]
        expected = torch.cat([of_each[0][: before.end], of_each[1][after.start :]])
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-4)

    # Bytes of version 2 are changed after its publish: it never reaches the engine, which goes on with version 1.
    next(iter(publisher.slot(1).views.values()))[0, 0] += 1
    with pytest.raises(WeightsError, match="no whole copy of the weights in 16 attempts"):
        engine.fetch_weights(path, (2, 0))
    assert_of(run(engine, request())[0], first, 1)
    publisher.close()

    # vLLM would leave out what it has no place for.
    with pytest.raises(
        WeightsMismatchError, match=r"the engine's model has no layer model.layers.0.mlp.down_proj that"
    ):
        engine.update_weights(adapter_of(adapted(3, ["down_proj"])), 8)
    wait_until(lambda: not is_alive(engine.pid), 60, "its process ends")
    with pytest.raises(RlhfdError, match="ended with exit code 1"):
        run(engine, request())
