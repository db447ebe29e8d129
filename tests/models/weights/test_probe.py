"""The probe: equal weights give equal results, and a model that does not compute with its weights is detected."""

import dataclasses
import math

import pytest
import torch

from pipeline.errors import WeightsMismatchError
from pipeline.models.weights.probe import answer, check, tolerance_nats
from pipeline.models.weights.store import WeightsPublisher, WeightsReader
from pipeline.runtime.messages import Sealed
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.telemetry.reader import MetricsReader
from tests.rollout.test_worker import Bench
from tests.support import tiny

CPU = torch.device("cpu")
TOKENS = [2, 5, 7, 3, 11, 13, 4, 4, 9, 17]


def targets(model):
    return {f"actor.{name}": tensor for name, tensor in model.state_dict().items()}


def sharp(seed):
    """A model with confident predictions, as a trained one: any wrong tensor exceeds bfloat16's tolerance by far."""
    model = tiny.llama(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def published(tmp_path, model):
    """Publish a model's weights with its probe, as a trainer does."""
    publisher = WeightsPublisher(tmp_path / "weights", targets(model))
    return publisher.publish(16, targets(model), probe=answer(model, TOKENS, CPU))


def fetched(tmp_path, into):
    return WeightsReader(tmp_path / "weights").fetch(into)


def test_the_answer_is_the_sum_of_what_each_token_had_coming():
    model = tiny.llama()
    expected = 0.0
    for place in range(1, len(TOKENS)):
        logits = model(torch.tensor([TOKENS[:place]])).logits[0, -1].double().detach()
        expected += float(logits[TOKENS[place]] - math.log(float(logits.exp().sum())))

    assert answer(model, TOKENS, CPU) == Probe(pytest.approx(expected, abs=1e-4), len(TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["sdpa", "eager"])
def test_an_honest_worker_never_trips(tmp_path, dtype, kernels):
    for seed in range(8):
        trained, mine = tiny.llama(seed).to(dtype), tiny.llama(99).to(dtype)
        mine.set_attn_implementation(kernels)
        (tmp_path / str(seed)).mkdir()
        published(tmp_path / str(seed), trained)

        version = fetched(tmp_path / str(seed), targets(mine))

        assert version.probe is not None
        check(version, answer(mine, TOKENS, CPU), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["actor.lm_head.weight", "actor.model.layers.0.self_attn.q_proj.weight"])
def test_a_tensor_copied_to_where_the_model_does_not_look_is_found(tmp_path, dtype, name):
    published(tmp_path, sharp(1).to(dtype))
    model = sharp(2).to(dtype)
    stale = {**targets(model), name: targets(model)[name].clone()}

    version = fetched(tmp_path, stale)

    mine = answer(model, TOKENS, CPU)
    with pytest.raises(WeightsMismatchError) as raised:
        check(version, mine, dtype)
    for part in ("version=16", f"{version.fingerprint:016x}", f"{mine.log_prob:.6f}", f"{version.probe.log_prob:.6f}"):
        assert part in str(raised.value)


def test_weights_rounded_on_their_way_are_found(tmp_path):
    published(tmp_path, tiny.llama(1))
    model = tiny.llama(2)
    version = fetched(tmp_path, targets(model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())

    with pytest.raises(WeightsMismatchError):
        check(version, answer(model, TOKENS, CPU), torch.float32)


@pytest.mark.parametrize(
    ("mine", "trusted"),
    [
        (Probe(-10.0, 11), True),
        (Probe(-10.0099, 11), True),
        (Probe(-10.0101, 11), False),
        (Probe(-10.0, 10), False),
        (Probe(math.nan, 11), False),
    ],
)
def test_float32_may_differ_by_a_thousandth_of_a_nat_a_token(mine, trusted):
    version = WeightsVersion(3, 5, probe=Probe(-10.0, 11))

    assert tolerance_nats(torch.float32, 11) == pytest.approx(0.01)
    if trusted:
        check(version, mine, torch.float32)
    else:
        with pytest.raises(WeightsMismatchError):
            check(version, mine, torch.float32)


def test_a_worker_that_is_not_to_be_trusted_seals_nothing_and_is_counted(tmp_path):
    bench = Bench(tmp_path)

    def refuse(version):
        raise WeightsMismatchError("no")

    roller = bench.roller
    roller.weights = dataclasses.replace(roller.weights, check=refuse)
    bench.ticket()

    with pytest.raises(WeightsMismatchError):
        bench.worker.step()

    assert bench.sent.of(Sealed) == []
    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_weight_syncs_total", result="mismatch") == 1
    bench.close()
