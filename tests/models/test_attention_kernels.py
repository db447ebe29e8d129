"""No pass computes attention by cuDNN, forward, backward or computed again; the caller's choice of kernels stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import cuda as backends
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForSequenceClassification

from pipeline import (
    Critic,
    Experience,
    NaiveExperienceMaker,
    action_log_probs,
    action_log_probs_and_entropies,
    action_values,
    make_experience_batch,
    packed_action_log_probs,
    packed_action_values,
)
from pipeline.config.schema import TrainerConfig
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.recomputation import checkpoint_activations
from pipeline.models.reward_model import SequenceReward
from pipeline.models.weights import probe
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.support import tiny
from tests.support.items import item_of
from tests.support.padded_passes import log_probs_by_packing, values_by_packing
from tests.trainer.test_learner import experience_for, new_learner

CPU = torch.device("cpu")
LAYERS = 2
ACTIONS = 3
LEFT = torch.tensor([[0, 0, 5, 9, 4, 3], [7, 3, 11, 2, 6, 8]])
RIGHT = torch.tensor([[5, 9, 4, 3, 0, 0], [7, 3, 11, 2, 6, 8]])
SAMPLING = Sampling(max_length=10, pad_token_id=tiny.PAD, eos_token_ids=(), seed=3)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each attention might have taken cuDNN's kernel; the caller of the passes allows it, as torch does."""
    seen: list[bool] = []
    attend = functional.scaled_dot_product_attention

    def noted(*arguments: Any, **keywords: Any) -> Tensor:
        seen.append(backends.cudnn_sdp_enabled())
        return attend(*arguments, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    before = backends.cudnn_sdp_enabled()
    backends.enable_cudnn_sdp(True)
    yield seen
    assert backends.cudnn_sdp_enabled(), "the caller's choice is not restored"
    backends.enable_cudnn_sdp(before)


def critic() -> Critic:
    made = Critic.from_actor(tiny.llama())
    nn.init.normal_(made.value_head.weight, generator=torch.Generator().manual_seed(0))
    return made


def reward_model() -> SequenceReward:
    config = tiny.llama().config
    config.num_labels = 1
    return SequenceReward(LlamaForSequenceClassification(config).eval())


def packed() -> Experience:
    return make_experience_batch([item_of(2, 4), item_of(3, 2)], packing_samples=True)


def actions(rows: Tensor) -> Tensor:
    return rows[:, -ACTIONS:] != 0


class Fake(nn.Module):
    """A model of one's own, which checkpoints its layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCABULARY_SIZE, 8)
        self.head = nn.Linear(8, tiny.VOCABULARY_SIZE)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.states(input_ids, attention_mask)))

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = (attention_mask != 0)[:, None, None]
        states: Any = checkpoint(self.attend, self.embedding(input_ids), mask, use_reentrant=False)
        return states  # type: ignore[no-any-return]

    def attend(self, states: Tensor, mask: Tensor) -> Tensor:
        heads = states.unsqueeze(1)
        return functional.scaled_dot_product_attention(heads, heads, heads, mask).squeeze(1)


class FakeCritic(Fake):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.states(input_ids, attention_mask))[..., 0]  # type: ignore[no-any-return]


def checkpointed(model: Any) -> Any:
    assert checkpoint_activations([model], CPU, True)
    return model


def checkpointed_by_transformers(model: Any) -> Any:
    module = getattr(model, "backbone", model)
    # The older name, for transformers of which the newer one is unknown.
    getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
    return model.train()


DIFFERENTIABLE: dict[str, tuple[Callable[[], Any], int]] = {
    "log-probs, padding on the left": (lambda: action_log_probs(tiny.llama(), LEFT, LEFT != 0, ACTIONS), 0),
    "log-probs, padding on the right": (lambda: action_log_probs(tiny.llama(), RIGHT, RIGHT != 0, ACTIONS), 0),
    "log-probs and entropies": (
        lambda: sum(action_log_probs_and_entropies(tiny.llama(), LEFT, LEFT != 0, ACTIONS)), 0,
    ),
    "log-probs, checkpointed layers": (
        lambda: action_log_probs(checkpointed(tiny.llama()), LEFT, LEFT != 0, ACTIONS), LAYERS,
    ),
    "log-probs, layers checkpointed by transformers": (
        lambda: action_log_probs(checkpointed_by_transformers(tiny.llama()), LEFT, LEFT != 0, ACTIONS), LAYERS,
    ),
    "log-probs of a model of one's own": (lambda: action_log_probs(Fake(), LEFT, LEFT != 0, ACTIONS), 1),
    "values": (lambda: action_values(checkpointed(critic()), LEFT, LEFT != 0, ACTIONS), LAYERS),
    "values of a critic of one's own": (lambda: action_values(FakeCritic(), LEFT, LEFT != 0, ACTIONS), 1),
    "a critic called by itself": (lambda: checkpointed_by_transformers(critic())(LEFT, LEFT != 0), LAYERS),
    "packed log-probs": (lambda: torch.cat(packed_action_log_probs(checkpointed(tiny.llama()), packed())), LAYERS),
    "packed values": (lambda: torch.cat(packed_action_values(checkpointed(critic()), packed())), LAYERS),
    "log-probs by packing": (
        lambda: log_probs_by_packing(checkpointed(tiny.llama()), RIGHT, RIGHT != 0, actions(RIGHT))[0], LAYERS,
    ),
    "values by packing": (
        lambda: values_by_packing(checkpointed(critic()), LEFT, LEFT != 0, actions(LEFT)), LAYERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_pass_that_is_trained_through_takes_cudnn(allowed: list[bool], name: str) -> None:
    """The backward pass is the caller's; layers that it computes again choose their kernels again."""
    build, again = DIFFERENTIABLE[name]

    result = build()
    forward = len(allowed)
    assert backends.cudnn_sdp_enabled(), "between the passes the caller's choice holds"
    result.sum().backward()

    assert forward >= 1 and len(allowed) - forward == again
    assert not any(allowed)
    assert backends.cudnn_sdp_enabled()


def make_experience(**changes: Any) -> None:
    class Tokenizer:
        pad_token_id = tiny.PAD
        eos_token_id = tiny.EOS

    maker = NaiveExperienceMaker(
        tiny.llama(), critic(), reward_model(), tiny.llama(seed=2), Tokenizer(), kl_coef=0.1, **changes
    )
    maker.make_experience(LEFT, (LEFT != 0).long(), max_length=10, seed=1)


class OwnRewardModel(Fake):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_others: Any) -> Tensor:  # type: ignore[override]
        return self.states(input_ids, attention_mask).sum(dim=(1, 2))


def score_by_a_model_of_ones_own() -> None:
    class Tokenizer:
        pad_token_id = tiny.PAD
        eos_token_id = tiny.EOS

    actor = tiny.llama()
    maker = NaiveExperienceMaker(actor, None, OwnRewardModel(), actor, Tokenizer(), use_grpo=True, num_generation=2)
    maker.make_experience(LEFT, (LEFT != 0).long(), max_length=10, seed=1)


def train(algorithm: Any, **settings: Any) -> None:
    learner = new_learner(algorithm, TrainerConfig(activation_checkpointing=True, **settings), seed=0)
    learner.update([experience_for(learner, algorithm)])


WHOLE: dict[str, Callable[[], Any]] = {
    "maker": make_experience,
    "reward model of one's own": score_by_a_model_of_ones_own,
    "reward model": lambda: reward_model()(RIGHT, (RIGHT != 0).long()),
    "learner of ppo": lambda: train("ppo"),
    "learner of grpo": lambda: train("grpo"),
    "learner, packed": lambda: train("ppo", packing=True),
    "learner, shared prompts": lambda: train("grpo", shared_prefix=True),
    "engine": lambda: TransformersGenerator(tiny.llama()).generate(LEFT, LEFT != 0, SAMPLING),
    "engine, fixed shapes": lambda: TransformersGenerator(tiny.llama(), fixed_shapes=True).generate(
        LEFT, LEFT != 0, SAMPLING
    ),
    "engine over generate": lambda: ActorGenerator(tiny.llama()).generate(LEFT, (LEFT != 0).long(), SAMPLING),
    "probe": lambda: probe.answer(tiny.llama(), [5, 6, 7], CPU),
}


@pytest.mark.parametrize("name", WHOLE)
def test_no_part_of_the_library_takes_cudnn(allowed: list[bool], name: str) -> None:
    WHOLE[name]()

    assert allowed and not any(allowed)


def test_the_kernels_of_a_caller_that_has_forbidden_cudnn_stay_without_it(allowed: list[bool]) -> None:
    backends.enable_cudnn_sdp(False)

    action_log_probs(tiny.llama(), LEFT, LEFT != 0, ACTIONS).sum().backward()

    assert not backends.cudnn_sdp_enabled()
    assert allowed and not any(allowed)
    backends.enable_cudnn_sdp(True)


def test_a_caller_that_allows_cudnn_alone_gets_the_others_for_the_pass(allowed: list[bool]) -> None:
    others = backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        result = action_log_probs(tiny.llama(), LEFT, LEFT != 0, ACTIONS)
        result.sum().backward()
        assert backends.cudnn_sdp_enabled() and not any(enabled() for enabled in others)

    assert all(enabled() for enabled in others)
    assert allowed and not any(allowed)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, states: Tensor) -> Tensor:
        return states * 1

    @staticmethod
    def backward(_: Any, _gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("a NaN")


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_pass_that_raises_restores_the_callers_choice(allowed: list[bool], place: str) -> None:
    model = Fake()

    def break_it(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if place == "forward":
            raise ValueError("a NaN")
        return Breaks.apply(output)  # type: ignore[no-any-return, no-untyped-call]

    model.head.register_forward_hook(break_it)
    with pytest.raises(ValueError, match="a NaN"):
        action_log_probs(model, LEFT, LEFT != 0, ACTIONS).sum().backward()

    assert backends.cudnn_sdp_enabled()
    assert allowed == [False]


def test_passes_of_two_threads_share_the_choice_and_the_last_one_restores_it(allowed: list[bool]) -> None:
    """One begins first and ends first."""
    one, two = contextlib.ExitStack(), contextlib.ExitStack()
    one.enter_context(without_cudnn_attention())
    two.enter_context(without_cudnn_attention())

    one.close()
    assert not backends.cudnn_sdp_enabled()
    two.close()

    assert backends.cudnn_sdp_enabled() and not allowed
