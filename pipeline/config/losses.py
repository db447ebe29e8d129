"""The keys of losses, advantages and log-probs: those of ``[trainer]`` and of ``[rollout]``; see docs/losses.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pipeline.config.model_files import has_images
from pipeline.config.presets import PRESETS
from pipeline.config.sections import Section
from pipeline.config.types import FUNCTION, matches

if TYPE_CHECKING:
    from pipeline.config.schema import Config

POLICY_LOSSES: Final = ("ppo", "gspo", "cispo", "reinforce")
GROUP_ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
ZERO_WITHOUT_SIGNAL: Final = ("grpo", "dr_grpo", "rloo")
"""The estimators whose advantages are 0 in a group of equal rewards, so that its rows need no training."""
ADVANTAGES: Final = (*GROUP_ADVANTAGES, "gae")
PROBE_EVERY: Final = 16
"""Versions between the trainer's answers to the probe, which workers compare with theirs."""


def _pattern_of(names: tuple[str, ...]) -> str:
    return f"({'|'.join(names)}|{FUNCTION.pattern})"


def _named(names: tuple[str, ...]) -> AfterValidator:
    return matches(_pattern_of(names), f'must be {", ".join(names)}, or of the form "module:function"')


PolicyLossName = Annotated[
    str, _named(POLICY_LOSSES), Field(json_schema_extra={"pattern": f"^{_pattern_of(POLICY_LOSSES)}$"})
]

AdvantageName = Annotated[str, _named(ADVANTAGES), Field(json_schema_extra={"pattern": f"^{_pattern_of(ADVANTAGES)}$"})]

_ALGORITHMS: Final = ("grpo", "ppo", *PRESETS)


def _check_algorithm(value: object) -> object:
    # A preset has become grpo by now (`pipeline.config.load`).
    if value not in _ALGORITHMS[:2]:
        message = f"must be {', '.join(_ALGORITHMS[:-1])} or {_ALGORITHMS[-1]}"
        raise PydanticCustomError("named", "{message}", {"message": message})
    return value


AlgorithmName = Annotated[
    Literal["grpo", "ppo"], BeforeValidator(_check_algorithm), Field(json_schema_extra={"enum": [*_ALGORITHMS]})
]

KlEstimator = Literal["k1", "k2", "k3"]

LossRows = Literal["trained", "all"]
AdvantageScale = Literal["none", "batch"]
RewardScale = Literal["none", "running"]
LossAggregation = Literal["token_mean", "sequence_mean", "dr_grpo"]

LogProbsBy = Literal["engine", "worker", "trainer"]

GapAction = Literal["warn", "resync", "stop"]

ImportanceCorrection = Literal["token", "sequence", "token_mask", "sequence_mask", "icepop", "none"]


class UpdateSection(Section):
    """The updates of a step and the weight of its KL: part of ``[trainer]``."""

    epochs: int = Field(default=1, ge=1, le=1024)
    """Passes over the rows of a step, each with updates of its own."""
    mini_batches: int = Field(default=1, ge=1, le=2**16)
    """Optimizer updates per epoch, each on an equal share of the rows of the step."""
    target_kl: float | None = Field(default=None, gt=0)
    """KL of the policy that sampled to the trained one, in nats a token, above which a step takes no further update;
    left out: no bound."""
    kl_coef_target: float | None = Field(default=None, gt=0)
    """KL to the reference, in nats a token (rlhfd_kl_mean_nats), to which kl_coef is adapted after each step, over
    10,000 rows; left out: kl_coef is constant."""


class LossSection(UpdateSection):
    """The policy loss of a step: part of ``[trainer]``."""

    policy_loss: PolicyLossName = "ppo"
    """Policy loss: ppo, gspo, cispo, reinforce, or your own as "module:function" (docs/losses.md)."""
    clip_low: float | None = Field(default=None, gt=0)
    """Clip range of the policy ratio below 1; left out: clip_range."""
    clip_high: float | None = Field(default=None, gt=0)
    """Clip range of the policy ratio above 1; left out: clip_range."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Maximum ratio of an action of negative advantage (ppo, gspo); left out: no maximum."""
    loss_aggregation: LossAggregation = "token_mean"
    """Mean over all actions of the step, over its responses, or sum over a constant length (dr_grpo)."""
    dr_grpo_tokens: int | None = Field(default=None, ge=1)
    """Constant length of dr_grpo, in tokens; left out: those of the longest response."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL in the loss; the gradient of k1 is 0 on average."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    advantage_scale: AdvantageScale = "none"
    """Divisor of advantages that are rewards less the mean of their group (dr_grpo, rloo): none, or the standard
    deviation of the rewards of all rows of the step (batch), as with TRL's scale_rewards."""
    loss_rows: LossRows = "trained"
    """Rows that count in the loss of grpo: without a KL in the reward those of groups with different scores alone, or
    all, as in TRL, verl and OpenRLHF: those of equal groups then enlarge the divisors and have a KL and an entropy."""
    mask_cut_responses: bool = False
    """Whether responses that were cut at their maximum length are not trained (DAPO)."""
    importance_correction: ImportanceCorrection = "token"
    """Correction for an engine that is not the trainer's own function, where rows carry the engine's log-probs: weights
    truncated at the cap, or masked beyond it, by token or by sequence."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Maximum weight of importance_correction."""


class LogProbsSection(Section):
    """Log-probs of a rollout, repeatability, the proof that engine and trainer agree: part of ``[rollout]``."""

    deterministic: bool = False
    """Whether a prompt gets the same tokens with the same seed and version, alone and beside others: vllm computes so
    on GPUs of compute capability 8.0 or above; a worker whose engine cannot says so in the log."""
    log_probs: LogProbsBy | None = None
    """Source of the sampling policy's log-probs: the engine, a pass of the worker, or a pass of the trainer before its
    step on the batch; left out: the engine for transformers in float32, else the worker; with policy_loss = reinforce
    and stale rows the trainer."""
    engine_gap_nats: float | None = Field(default=None, gt=0)
    """Maximum mean difference of engine's and trainer's log-probs in the probe of a version, in nats a token; left out:
    0.001 in float32, 0.05 in float16, 0.25 in bfloat16, 0.5 with quantization = fp8."""
    engine_gap_action: GapAction = "resync"
    """Action on an engine whose probe differs by more, or that computes with old weights: a warning, the weights once
    more and then the end of the worker, or its end."""


class AdvantageSection(LogProbsSection):
    """Rewards and advantages of a rollout: part of ``[rollout]``."""

    advantages: AdvantageName | None = None
    """Advantages: grpo, dr_grpo, rloo, reinforce_baseline, gae, or your own as "module:function" (docs/losses.md); left
    out: grpo (GRPO), gae (PPO)."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of the KL in the reward."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Tokens before the maximum length of a response over which its reward falls linearly (DAPO); 0: no penalty of
    length."""
    max_refill: int = Field(default=0, ge=0, le=1000)
    """Dynamic sampling (DAPO): groups whose rewards are all equal, but for a KL, are dropped and prompts issued in
    their place, up to this many times the prompts of a version; 0: such groups stay in the batch."""
    reward_scale: RewardScale = "none"
    """Divisor of scores that are trained (gae, dr_grpo, rloo): none, or the running deviation of the scores of the
    steps before the version that samples; reward_clip then bounds the quotient."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Reward that a response of the maximum length loses by overlong_buffer_tokens."""


def log_probs_by(config: Config) -> LogProbsBy:
    """Return the source of the sampling policy's log-probs.

    In float32 the log-probs of the engine `transformers` equal the trainer's up to rounding. A policy loss without a
    ratio corrects for no staleness: with the trainer's log-probs the off-policy correction covers it.
    """
    if config.rollout.log_probs is not None:
        return config.rollout.log_probs
    if lacks_ratio_for_staleness(config) and config.trainer.kind == "builtin" and not config.rollout_kl_coef:
        return "trainer"
    is_own = config.rollout.engine == "transformers" and config.model.dtype == "float32"
    return "engine" if is_own else "worker"


def signals_without_scores(config: Config) -> bool:
    """Return whether a group of equal scores may have a signal: by a KL in the reward, or by its estimator.

    An estimator of the user's may use more than the scores of the group.
    """
    return config.rollout_kl_coef > 0 or config.advantages not in ZERO_WITHOUT_SIGNAL


def worker_holds_actor(config: Config) -> bool:
    """Return whether a worker loads the actor beside its engine; reads config.json of the actor's folder.

    vLLM has the actor itself. It is compared with the answers that the trainer publishes, which are of text alone.
    """
    has_answers = config.trainer.kind == "builtin"
    if config.rollout.engine != "vllm" or not has_answers or log_probs_by(config) == "worker":
        return True
    is_reference = config.reference_on == "worker" and config.reference_folder is None
    return is_reference or has_images(Path(config.model.actor))


def engine_is_forked(config: Config) -> bool:
    """Return whether the engines of this machine are forks of a process that has imported vLLM.

    Not with several cards a worker, whose ranks are programs of their own, with `rollout.sleep`, where the engine
    begins with a turn on its card, nor with `rollout.deterministic`, by which vLLM's import differs.
    """
    rollout = config.rollout
    is_alone = rollout.tensor_parallel == 1 and not rollout.sleep and not rollout.deterministic
    return rollout.engine == "vllm" and is_alone and config.cluster.engine == "local"


def answers_every(config: Config) -> int:
    """Return the versions between two answers of the trainer to the probe."""
    return PROBE_EVERY if worker_holds_actor(config) else 1


def lacks_ratio_for_staleness(config: Config) -> bool:
    """Return whether rows may be stale and the policy loss has no ratio that corrects for it."""
    return config.trainer.policy_loss == "reinforce" and config.buffer.max_staleness > 0
