"""The configuration: sections and keys with type, bound, unit and meaning; the defaults are the embedded run's.

Some defaults suit that run alone: a model of its own has others (`pipeline.config.own_model`), named in descriptions.
Sections with a file of their own lie beside this one.

`pipeline.config.load` reads file, environment and ``--set``. Every `Config` has passed the same checks. An optional
key whose value follows from other keys is None here; a property of `Config` returns the value in force.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pipeline.config.conflicts import conflicts
from pipeline.config.evaluation import EvaluationConfig
from pipeline.config.lengths import Lengths, lengths_of, row_bytes_bound
from pipeline.config.losses import AdvantageSection, AlgorithmName, LossSection
from pipeline.config.optimizers import Optimizer
from pipeline.config.prompts import PromptsConfig
from pipeline.config.rates import Decay, Schedule
from pipeline.config.rewards import DEFAULT_REWARD, EnvironmentSection, Reward
from pipeline.config.sections import (
    LIVE,
    BufferConfig,
    ClusterConfig,
    MetricsConfig,
    ModelConfig,
    ReferenceRole,
    SamplesConfig,
    Section,
)
from pipeline.config.types import AnyPath, Betas, Bytes, Devices, EngineName, StopStrings, StopTokenIds


class DaemonConfig(Section):
    """The daemon: its folders, start, restarts, shutdown and log."""

    name: str = Field(default="rlhfd", pattern=r"^[a-z0-9-]+$", max_length=64)
    """Name of the instance in process titles and the journal: a-z, 0-9 and -."""
    runtime_dir: AnyPath = Path("run/rlhfd")
    """Folder by which commands find the running instance; one instance per folder."""
    state_dir: AnyPath = Path("state")
    """Folder of the data that stays: a folder for each run in runs/, the log, the embedded task; of one instance at a
    time."""
    run_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Name of the run and of its folder in state_dir/runs, for runs of your own naming that differ in the learning rate
    only; by default from the run's identity, such as grpo-Qwen2.5-0.5B-3f9c1a2b."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of prompt order, sampling and initialisation."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text for people, or as JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", json_schema_extra=LIVE)
    """Lowest level that is logged; a running vLLM keeps that of its start."""
    log_texts: bool = False
    """Whether the log quotes the errors and return values of reward functions and chat templates, which may contain
    prompts, responses and answers."""
    drain_timeout_s: float = Field(default=30.0, ge=0, json_schema_extra=LIVE)
    """Seconds that rollouts get to finish at a shutdown; checkpoint and spool get the time they need."""
    startup_timeout_s: float = Field(default=300.0, gt=0, json_schema_extra=LIVE)
    """Seconds that a role gets from start to ready; a late process is killed and started once more."""
    hang_timeout_s: float = Field(default=300.0, ge=0, json_schema_extra=LIVE)
    """Seconds without progress after which a process is killed and restarted; must exceed the longest single call of a
    reward model or of a model's own generate; 0: never."""
    progress_timeout_s: float = Field(default=1800.0, ge=0, json_schema_extra=LIVE)
    """Seconds in which no row is sealed, trained or dropped and no optimizer step is taken, after which the process at
    fault is restarted, and at the second time the run exits with 70; 0: never."""
    restart_delay_s: float = Field(default=0.5, gt=0, json_schema_extra=LIVE)
    """Seconds before a dead process is restarted; doubled at each death, up to 120 times."""
    restart_limit: int = Field(default=5, ge=1, json_schema_extra=LIVE)
    """Starts of a process within 10 minutes after which it is not restarted; also the number of consecutive deaths,
    however far apart, of a process that never ran for five minutes after it was ready."""


class RolloutConfig(AdvantageSection, EnvironmentSection):
    """Rollout workers: their number, devices, sampling and scoring."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Number of rollout processes."""
    devices: Devices = "auto"
    """Numbers of the CUDA devices that the workers share, or auto."""
    algorithm: AlgorithmName = "grpo"
    """Algorithm that computes advantages from rewards: grpo, ppo, or a preset, which is grpo with other defaults
    (docs/losses.md)."""
    engine: EngineName = "transformers"
    """Engine that generates the responses: transformers, vllm, your own as "module:function", or auto: vllm where it is
    installed and the run has GPUs, else transformers."""
    cache_bytes: Bytes | None = Field(default=None, gt=0)
    """Key-value cache of vllm, in bytes or as "4GiB"; left out: on a GPU with a trainer rank room for the rows that run
    at a time, as far as a step leaves it, on another one what is free, on a CPU 1 GiB."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs of one worker, over which vllm splits the actor; on a CPU as many processes."""
    quantization: Literal["none", "fp8"] = "none"
    """Weights that vllm computes with: the published ones, or those of its linear layers quantized to 8 bits at each
    update (fp8); trainer.importance_correction corrects for the difference."""
    sleep: bool = False
    """Whether the engine sleeps while the trainer steps, which gives its memory of a shared GPU to the trainer; for
    vllm, and an engine of your own that can."""
    batch_size: int | None = Field(default=None, ge=1)
    """Prompts per ticket; left out: half a batch of rows."""
    tickets_ahead: int = Field(default=0, ge=0, le=1024)
    """Tickets that a worker has in hand; 0: as many as fill the engine, and 2 for one that blocks."""
    weight_updates: Literal["between", "in_flight"] = "between"
    """When a worker takes new weights: between rollouts, which it finishes first, or while they run."""
    num_generations: int = Field(default=8, ge=1, le=4096)
    """Responses per prompt (G); GRPO only."""
    max_length: int | None = Field(default=None, ge=2, le=2**20)
    """Maximum tokens of prompt and response together; left out: the sum of the next two keys, else 24."""
    max_prompt_length: int | None = Field(default=None, ge=1, lt=2**20)
    """Maximum tokens of a prompt, a longer one is set aside; left out: max_length less max_new_tokens."""
    long_prompts: Literal["set_aside", "cut_left"] = "set_aside"
    """A longer prompt is set aside, or loses its first tokens (cut_left), after the chat template; one with images is
    set aside."""
    max_new_tokens: int | None = Field(default=None, ge=1, lt=2**20)
    """Maximum tokens of a response; left out: max_length less max_prompt_length, or without that key less the longest
    prompt of the ticket."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the tokens that are sampled from."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are sampled from; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Least probability of a token that is sampled from, as a share of the most likely token's; 0: all."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL penalty in the reward; left out: 0.01 (PPO), 0 (GRPO)."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of the value of the next token (PPO)."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (PPO)."""
    inference_batch_size: int | None = Field(default=None, ge=1)
    """Rows generated at once; left out: the ticket's, of vLLM 256; halved if a GPU is full (not of vLLM)."""
    logits_forward_batch_size: int | None = Field(default=None, ge=1)
    """Rows per forward pass of log-probs, values or scores; left out: of logits_forward_tokens on a GPU, a minute's on
    a CPU; halved if a GPU is full."""
    logits_forward_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Tokens per forward pass of log-probs, values or scores, padding included, in place of logits_forward_batch_size;
    a longer row is a pass of its own; halved if a GPU is full; left out: on a GPU as many as fit by `rlhfd plan`,
    65,536 at most."""
    stop_token_ids: StopTokenIds = None
    """Token ids that end a response, beside those of the model's files: one, a list of which each does, or a list of
    sequences, [[5, 6], [7]]."""
    stop: StopStrings = Field(default=[])
    """Texts that end a response, such as ["</answer>"]: with the token that completes one of them."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Maximum magnitude of a score that is trained, with ppo in an environment of each turn's; rows beyond it are
    counted; left out: no maximum."""
    special_tokens: bool = True
    """Whether the text of a response has its special tokens, but ends and padding, for rewards and environments; false:
    it has none of them."""
    reward_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds that the reward functions get per row, or per call for all rows; 0: no limit, called in the worker's own
    process."""
    reward_processes: int = Field(default=1, ge=1, le=1024)
    """Rows per worker that are scored at the same time, each in a process."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads per worker."""
    ticket_timeout_s: float = Field(default=600.0, gt=0, json_schema_extra=LIVE)
    """Seconds that a worker gets per ticket."""
    max_attempts: int = Field(default=3, ge=1, le=1000, json_schema_extra=LIVE)
    """Attempts per ticket before its prompts are set aside."""


class TrainerConfig(LossSection):
    """The trainer: its ranks and its optimization."""

    kind: Literal["builtin", "external"] = "builtin"
    """The trainer of this package, or your own that calls pipeline.connect."""
    world_size: int = Field(default=1, ge=1, le=1024)
    """Number of trainer ranks, one process each."""
    nodes: int = Field(default=1, ge=1, le=1024)
    """Machines of the ranks, each with as many of them: this one, and others of the Ray cluster."""
    devices: Devices = "auto"
    """CUDA device numbers, one per rank of this machine, or auto."""
    sharding: Literal["auto", "none", "full", "hybrid"] = "auto"
    """Full: ranks split weights, gradients and moments; hybrid: those of each machine split them, and machines hold
    copies; none: each holds all; auto: full where the plan of `rlhfd plan` says that a whole model does not fit beside
    each rank."""
    max_steps: int = Field(default=0, ge=0)
    """Optimizer steps after which the run ends; 0: no end."""
    max_epochs: int = Field(default=0, ge=0, le=2**20)
    """Passes over the prompts after which the run ends, unless it has taken max_steps before; the last rows that are
    fewer than a step's are dropped; 0: no end."""
    optimizer: Optimizer = "adamw"
    """AdamW; AdamW with moments of 8 bits, a quarter of the bytes (adamw_8bit, needs the package bitsandbytes); or Muon
    for the matrices of decoder layers with AdamW for all other weights (muon)."""
    learning_rate: float = Field(default=4e-4, gt=0)
    """Maximum learning rate of the actor."""
    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the critic (PPO)."""
    betas: Betas = (0.9, 0.99)
    """AdamW's decay rates of both moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Schedule = "linear"
    """Way in which the learning rate falls after the warm-up: on a line, along half a cosine, or not at all
    (constant)."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps over which the learning rate rises."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up as a share of decay_steps, or without a decay of max_steps, in place of warmup_steps; 0: warmup_steps."""
    decay_steps: int = Field(default=150, ge=0)
    """Optimizer steps, with warm-up, over which the learning rate falls; 0: no decay."""
    final_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the maximum."""
    gradient_clip_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm of a step."""
    clip_range: float = Field(default=0.2, gt=0)
    """Clip range of the policy ratio around 1."""
    value_clip_range: float = Field(default=0.2, gt=0)
    """Clip range of values in the value loss (PPO), with normalize_values in units of the deviation."""
    normalize_values: bool = False
    """Whether the critic learns values in units of the running deviation of returns, by PopArt (PPO)."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL in the loss; left out: 0.01 (GRPO), 0 (PPO)."""
    critic_warmup_steps: int = Field(default=10, ge=0)
    """First steps, which train the critic alone (PPO)."""
    whiten_advantages: bool = True
    """Whether advantages are normalized (PPO)."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Rows per training pass; left out: of micro_batch_tokens on a GPU, 48 at most on a CPU; halved if a GPU is
    full."""
    micro_batch_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Tokens per training pass, in place of micro_batch_size: rows of similar length, at most a tenth of them padding;
    a longer row is a pass of its own; halved if a GPU is full; left out: on a GPU as many as fit by `rlhfd plan`,
    65,536 at most."""
    activation_checkpointing: bool | None = None
    """Whether the backward pass computes each decoder layer again in place of keeping its activations: less memory, a
    third more operations, the same gradients; left out: on a GPU on which, by `rlhfd plan`, a step does not fit without
    it."""
    packing: bool | None = None
    """Whether training passes hold rows of text end to end, without padding, each row attending to itself alone; losses
    and gradients are the same except for rounding; left out: where the models can; unless it is false so do the
    workers' passes for log-probs, values and scores on a GPU in 16 bits."""
    shared_prefix: bool | None = None
    """Whether training passes, and the workers' log-prob passes of the policy and of the reference, compute a prompt
    once for all its responses in a pass; losses and gradients are the same except for rounding; left out: on a CPU,
    where it saves 15 % of the tokens and the models can."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=2**16)
    """Batches of a rank per optimizer step."""
    publish_every: int = Field(default=1, ge=1, le=2**16)
    """Optimizer steps per published version."""
    save_every: int = Field(default=0, ge=0, json_schema_extra=LIVE)
    """Optimizer steps per checkpoint; 0: only at the end."""
    keep_checkpoints: int = Field(default=3, ge=0)
    """Checkpoints of a run that are kept; 0: all."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a start resumes from the last checkpoint of the same run; never: each start removes that run and begins
    it anew, as `rlhfd start --fresh` does once."""
    keep_state: Literal["auto", "memory", "disk"] = "auto"
    """State from which a killed trainer resumes: shared memory, exactly, or the last checkpoint; auto: memory where
    /dev/shm has room for it."""
    keep_state_every: int = Field(default=1, ge=1, le=2**16)
    """Keep the training state with every n-th version: a killed trainer goes back to the newest version that has one,
    and the prompts since are issued again."""
    record: Literal["off", "steps", "rows"] = "off"
    """What is kept of each step in the run's recording/: a line with the origin of its rows and the digest of its
    weights, or the rows too, from which `rlhfd replay` takes the step again; one rank only."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads per rank."""

    @property
    def decay(self) -> Decay:
        """The learning rate's course, as a share of the maximum."""
        length = 0 if self.schedule == "constant" else self.decay_steps
        warmup = math.ceil(self.warmup_ratio * (length or self.max_steps)) if self.warmup_ratio else self.warmup_steps
        return Decay(self.schedule, warmup, length, self.final_learning_rate_ratio)

    @property
    def weight_slots(self) -> int:
        """Versions of the weights held at once; a third one where a version may have no training state."""
        return 2 if self.kind == "builtin" and self.keep_state_every == 1 else 3


class Config(Section):
    """A whole configuration, checked.

    Raises:
        pydantic.ValidationError: At construction, if a value or a combination of values is wrong.
    """

    daemon: DaemonConfig = DaemonConfig()
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()
    samples: SamplesConfig = SamplesConfig()
    cluster: ClusterConfig = ClusterConfig()
    rewards: list[Reward] = Field(default=[DEFAULT_REWARD])
    """Functions and models that score a response: names, or a table [[rewards]] for each, with its weight and the
    options of its name; [] for none."""

    @property
    def group_size(self) -> int:
        """Rows of one prompt (G)."""
        return self.rollout.num_generations if self.rollout.algorithm == "grpo" else 1

    @property
    def sample_batch_size(self) -> int:
        """Rows of one batch of one rank."""
        return self.buffer.sample_batch_size or (256 if self.rollout.algorithm == "grpo" else 128)

    @property
    def prompts_per_ticket(self) -> int:
        """Prompts of one ticket."""
        return self.rollout.batch_size or max(1, self.sample_batch_size // (2 * self.group_size))

    @property
    def row_bytes(self) -> int:
        """Maximum bytes of one row in the arena."""
        return self.buffer.row_bytes or row_bytes_bound(self.lengths.row)

    @property
    def lengths(self) -> Lengths:
        """Maximum tokens of a row, a prompt and a response."""
        return lengths_of(self.rollout)

    @property
    def rollout_kl_coef(self) -> float:
        """Weight of the KL penalty inside the reward."""
        given, default = self.rollout.kl_coef, 0.01 if self.rollout.algorithm == "ppo" else 0.0
        return default if given is None else given

    @property
    def advantages(self) -> str:
        """Name of the advantages."""
        return self.rollout.advantages or ("grpo" if self.rollout.algorithm == "grpo" else "gae")

    @property
    def trainer_kl_coef(self) -> float:
        """Weight of the KL in the loss."""
        given, default = self.trainer.kl_coef, 0.01 if self.rollout.algorithm == "grpo" else 0.0
        return default if given is None else given

    @property
    def reference_on(self) -> ReferenceRole | None:
        """Role that computes the reference's log-probs; None if no KL weight is above 0."""
        if not (self.rollout_kl_coef or self.trainer_kl_coef):
            return None
        return "trainer" if self.model.reference_device == "trainer" else "worker"

    @property
    def reference_folder(self) -> str | None:
        """Folder of a reference that is a model of its own; None if it is the actor without its adapters."""
        model = self.model
        path = model.reference or model.actor
        return None if model.lora_rank and path == model.actor else path

    @property
    def ranks_here(self) -> int:
        """Trainer ranks on each machine, this one among them."""
        return self.trainer.world_size // self.trainer.nodes

    @property
    def shards_trainer(self) -> bool:
        """Whether the trainer's ranks hold shards of the models; one rank holds all."""
        return self.trainer.sharding in ("full", "hybrid") and self.trainer.world_size > 1

    @property
    def shards(self) -> int:
        """Ranks over which a model of the trainer is split; 1 if each rank holds all of it."""
        return {"full": self.trainer.world_size, "hybrid": self.ranks_here}.get(self.trainer.sharding, 1)

    @property
    def rows_per_version(self) -> int:
        """Rows that all ranks train between two published versions."""
        trainer = self.trainer
        return self.sample_batch_size * trainer.world_size * trainer.gradient_accumulation_steps * trainer.publish_every

    def changed(self, section: str, **values: Any) -> Config:
        """Return the configuration with other values of a section, which are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Config:
        if found := conflicts(self):
            text = "; ".join(f"{conflict.keys[0]}: {conflict.message}" for conflict in found)
            raise PydanticCustomError("conflict", "{text}", {"text": text})
        return self
