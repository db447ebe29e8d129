"""The configuration: every section and key with its type, bound, unit and meaning; the defaults are the embedded run.

Reading files, the environment and ``--set`` is the work of `pipeline.config.load`; whatever way a `Config` is made, it
has passed the same checks. Keys that may be left out and then follow from others are None here and have a property on
`Config` that gives the value in force.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from pipeline.config.conflicts import conflicts
from pipeline.config.sizes import row_bytes_bound
from pipeline.config.types import AnyPath, Betas, Bytes, Devices, EngineName, FunctionName, Source, StopTokenIds

LIVE: Final[JsonDict] = {"x-reload": "live"}
"""On a field: `rlhfd reload` puts a new value in force in a running instance. Any other needs a restart."""


class _Section(BaseModel):
    # Strict: "8" for a number or true for 1 is a slip of the pen, not a wish.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


class DaemonConfig(_Section):
    """The daemon itself: where it lives and how it starts, ends and logs."""

    name: str = Field(
        default="rlhfd",
        pattern=r"^[a-z0-9-]+$",
        max_length=64,
        description="Name of the instance in process titles and metrics: a-z, 0-9 and -.",
    )
    runtime_dir: AnyPath = Field(
        default=Path("run/rlhfd"),
        description="Folder by which commands find the running instance; one instance a folder.",
    )
    state_dir: AnyPath = Field(
        default=Path("state"), description="Folder of what outlives a run: checkpoints, the spool, the embedded task."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of prompt order, sampling and initialisation.")
    log_format: Literal["text", "json"] = Field(default="text", description="Log lines for people, or JSON.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged.", json_schema_extra=LIVE
    )
    log_texts: bool = Field(
        default=False,
        description="Whether what a reward function or chat template raised or returned is logged in its own words, "
        "which may quote prompts, responses and answers.",
    )
    log_file_bytes: Bytes = Field(
        default=16 << 20,
        ge=0,
        description="Most room of the log in state_dir/log, where none is kept in systemd's journal; 0: no log.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that rollouts get to finish at a stop; checkpoint and spool get what their writing takes.",
        json_schema_extra=LIVE,
    )
    startup_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that a role gets from start to ready; one that is late is killed and started once more.",
        json_schema_extra=LIVE,
    )
    hang_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds without progress until a process is killed and started again, above the longest single "
        "call of a reward model or a model's own generate; 0: never.",
        json_schema_extra=LIVE,
    )
    progress_timeout_s: float = Field(
        default=1800.0,
        ge=0,
        description="Seconds in which no row is sealed, trained or dropped and no step taken, after which the culprit "
        "is started again, and at the second time the run ends with 70; 0: never.",
        json_schema_extra=LIVE,
    )
    restart_delay_s: float = Field(
        default=0.5,
        gt=0,
        description="Seconds before a dead process is started again; they double with each death.",
        json_schema_extra=LIVE,
    )
    restart_delay_max_s: float = Field(
        default=60.0, gt=0, description="Most seconds before it is started again.", json_schema_extra=LIVE
    )
    restart_limit: int = Field(
        default=5,
        ge=1,
        description="Starts of a process within restart_window_s after which it is left dead; and deaths in a row, "
        "however far apart, of one that never ran for five minutes once it was ready.",
        json_schema_extra=LIVE,
    )
    restart_window_s: float = Field(
        default=600.0, gt=0, description="Seconds over which starts are counted.", json_schema_extra=LIVE
    )


class ModelConfig(_Section):
    """The models, each a local directory as transformers saves it; none is ever downloaded."""

    actor: Source = Field(default="builtin:sort-digits", description="Directory of the policy and its tokenizer.")
    reference: Source | None = Field(
        default=None,
        description="Directory of the model that the KL is measured against; left out: the actor as it started.",
    )
    critic: Source | None = Field(
        default=None,
        description="Directory of the value model (PPO); left out: the actor's backbone with a value head of zeros.",
    )
    reward: Source | None = Field(
        default=None,
        description="Directory of a sequence classification model that scores responses; left out: functions only.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Number format.")
    lora_rank: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Rank of LoRA: the actor's adapters alone are trained and published; 0: off.",
    )
    lora_alpha: float = Field(default=32.0, gt=0, description="LoRA's alpha: adapters count alpha / rank times.")
    lora_targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj"],
        min_length=1,
        description="Last part of the names of the linear layers that get adapters.",
    )


class PromptsConfig(_Section):
    """What the policy is asked."""

    path: Source = Field(
        default="builtin:sort-digits",
        description='JSON lines file of {"prompt": ..., "answer": ..., "images": [...]}, answer and images optional.',
    )
    template: Literal["auto", "none", "chat"] = Field(
        default="auto",
        description="The tokenizer's chat template: for prompts that are messages (auto), for none, or for all (chat).",
    )


class RolloutConfig(_Section):
    """Rollout workers: how many, where, and how they sample and score."""

    workers: int = Field(default=1, ge=1, le=1024, description="Rollout processes.")
    devices: Devices = Field(default="auto", description="CUDA device numbers that the workers share, or auto.")
    algorithm: Literal["grpo", "ppo"] = Field(default="grpo", description="How advantages are made of rewards.")
    engine: EngineName = Field(
        default="transformers",
        description='What generates the responses: transformers, or a "module:function" of yours.',
    )
    batch_size: int | None = Field(
        default=None, ge=1, description="Prompts of one ticket; left out: half a batch of rows."
    )
    num_generations: int = Field(default=8, ge=1, le=4096, description="Responses to each prompt (G); GRPO only.")
    max_length: int = Field(default=24, ge=2, le=2**20, description="Tokens of prompt and response together, at most.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature, of log-probs too.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Probability mass that is sampled from.")
    top_k: int = Field(default=0, ge=0, description="How many of the likeliest tokens are sampled from; 0 for all.")
    kl_coef: float | None = Field(
        default=None, ge=0, description="Weight of the KL penalty in the reward; left out: 0.01 (PPO), 0 (GRPO)."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount of the value of the next token (PPO).")
    lam: float = Field(default=0.95, ge=0, le=1, description="Lambda of generalized advantage estimation (PPO).")
    inference_batch_size: int | None = Field(
        default=None, ge=1, description="Rows generated at once; left out: the ticket."
    )
    logits_forward_batch_size: int | None = Field(
        default=None, ge=1, description="Rows of one forward pass; left out: the ticket."
    )
    stop_token_ids: StopTokenIds = Field(
        default=None,
        description="Ends a response: a token, one sequence of tokens, or a list of sequences; left out: eos.",
    )
    reward_functions: list[FunctionName] = Field(
        default=["pipeline.sort_digits:exact_answer"],
        description='Functions "module:function" that score a response; their scores and the reward model\'s add up.',
    )
    reward_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds that the reward functions get for a row; 0: no limit, and called in the worker itself.",
    )
    reward_processes: int = Field(
        default=1, ge=1, le=1024, description="Rows that a worker has scored at the same time, each in a process."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each worker.")
    ticket_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds that a worker gets for one ticket.", json_schema_extra=LIVE
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Times a ticket is tried before its prompts are set aside.",
        json_schema_extra=LIVE,
    )


class BufferConfig(_Section):
    """What lies between rollout and training."""

    sample_batch_size: int | None = Field(
        default=None, ge=1, le=2**20, description="Rows of a rank's batch; left out: 256 (GRPO), 128 (PPO)."
    )
    limit: int = Field(
        default=0, ge=0, description="Batches that may wait at most; 0: bounded by staleness and bytes alone."
    )
    arena_bytes: Bytes = Field(
        default=64 << 20, gt=0, lt=2**62, description='Shared memory for experience, in bytes or as "64MiB", "2GiB".'
    )
    row_bytes: Bytes | None = Field(
        default=None,
        gt=0,
        lt=2**40,
        description=(
            'Room kept for one row, in bytes or as "4MiB": text, pixels and raw images; left out: text of '
            "rollout.max_length."
        ),
    )
    max_staleness: int = Field(
        default=1, ge=0, le=1024, description="Versions that a row may be old when it is trained; 0: in step."
    )
    stale_policy: Literal["drop", "keep"] = Field(
        default="drop",
        description="What becomes of rows that grew too old nonetheless: dropped and counted, or trained.",
    )
    checksum: bool = Field(default=True, description="Whether experience is checked for damage on its way.")
    quarantine_bytes: Bytes = Field(
        default=1 << 30,
        ge=0,
        lt=2**62,
        description="Most bytes of the copies of quarantined experience under daemon.state_dir; 0: no copies.",
    )
    journal_interval_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds after which what the buffer holds is written to daemon.state_dir again, as after each "
        "checkpoint: what a crash of the machine costs at most; 0: never.",
    )


class TrainerConfig(_Section):
    """The trainer: its ranks and its optimization."""

    kind: Literal["builtin", "external"] = Field(
        default="builtin", description="The trainer of this package, or one of your own that calls pipeline.connect."
    )
    world_size: int = Field(default=1, ge=1, le=1024, description="Trainer ranks, one process each.")
    devices: Devices = Field(default="auto", description="CUDA device numbers, one a rank, or auto.")
    max_steps: int = Field(default=0, ge=0, description="Optimizer steps after which the run ends; 0 for no end.")
    learning_rate: float = Field(default=4e-4, gt=0, description="Largest learning rate of the actor (AdamW).")
    critic_learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate of the critic (PPO).")
    betas: Betas = Field(default=(0.9, 0.99), description="AdamW's decay of both moments.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    warmup_steps: int = Field(default=10, ge=0, description="Optimizer steps over which the learning rate rises.")
    decay_steps: int = Field(
        default=150,
        ge=0,
        description="Optimizer steps, warm-up included, until the learning rate has fallen; 0: never.",
    )
    final_learning_rate_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Last learning rate as a share of the largest."
    )
    gradient_clip_norm: float = Field(default=1.0, gt=0, description="Largest gradient norm of a step.")
    clip_range: float = Field(default=0.2, gt=0, description="How far from 1 the policy ratio counts.")
    value_clip_range: float = Field(default=0.2, gt=0, description="How far values may move in the value loss (PPO).")
    kl_coef: float | None = Field(
        default=None, ge=0, description="Weight of the k3 KL in the loss; left out: 0.01 (GRPO), 0 (PPO)."
    )
    critic_warmup_steps: int = Field(default=10, ge=0, description="First steps, for the critic alone (PPO).")
    whiten_advantages: bool = Field(default=True, description="Whether advantages are normalized (PPO).")
    micro_batch_size: int | None = Field(default=None, ge=1, description="Rows of one pass; left out: the batch.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=2**16, description="Batches of a rank to one step.")
    publish_every: int = Field(default=1, ge=1, le=2**16, description="Optimizer steps to one version.")
    save_every: int = Field(
        default=0, ge=0, description="Optimizer steps to one checkpoint; 0: at the end.", json_schema_extra=LIVE
    )
    keep_checkpoints: int = Field(default=3, ge=0, description="Checkpoints of a run that are kept; 0: all.")
    resume: Literal["auto", "never"] = Field(
        default="auto", description="Whether a start goes on from the last checkpoint of the same run."
    )
    keep_state: Literal["memory", "disk"] = Field(
        default="memory",
        description="Where a killed trainer goes on from: shared memory, exactly, or the last checkpoint.",
    )
    probe_every: int = Field(
        default=16, ge=0, description="Versions from one that workers check their models against to the next; 0: none."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each rank.")


class MetricsConfig(_Section):
    """The HTTP server of metrics, health and the page."""

    enabled: bool = Field(default=True, description="Whether the HTTP server runs.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address it listens on.")
    port: int = Field(default=9477, ge=0, le=65535, description="TCP port; 0 for any that is free.")
    page: bool = Field(default=True, description="Whether it serves the page of the run at `/`.")
    tls_cert: AnyPath | None = Field(
        default=None, description="Certificate chain in PEM; with it the server speaks TLS."
    )
    tls_key: AnyPath | None = Field(default=None, description="The certificate's private key, of mode 0600.")
    token_file: AnyPath | None = Field(
        default=None,
        description="File of mode 0600 with a bearer token, asked for by all but /healthz and /readyz.",
        json_schema_extra=LIVE,
    )


class SamplesConfig(_Section):
    """Rollouts kept for people to read, on the page and by `rlhfd samples`."""

    per_minute: float = Field(
        default=30.0, ge=0, le=6000, description="Prompts a minute whose responses are kept, of all workers; 0: none."
    )
    bytes: Bytes = Field(
        default=16 << 20,
        ge=1 << 16,
        lt=2**40,
        description="Most bytes of what is kept under daemon.state_dir; the oldest go first.",
    )
    remote: bool = Field(
        default=False,
        description="Whether the page shows them where metrics.host is no loopback address too.",
    )


class ClusterConfig(_Section):
    """Where the workers' models compute."""

    engine: Literal["local", "ray"] = Field(
        default="local", description="In the workers' own processes, or as actors on any machine of a Ray cluster."
    )
    address: str = Field(
        default="auto",
        min_length=1,
        description="The Ray cluster: host:port of its head, or auto for the one that this machine is part of.",
    )
    worker_gpus: float = Field(
        default=1.0, ge=0, le=1, description="Share of a GPU of each actor; 0 where they compute on CPUs."
    )


class Config(_Section):
    """A whole configuration, checked.

    Raises:
        pydantic.ValidationError: At construction, if a value or a combination of values is wrong.
    """

    daemon: DaemonConfig = DaemonConfig()
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()
    samples: SamplesConfig = SamplesConfig()
    cluster: ClusterConfig = ClusterConfig()

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
        """Most bytes that one row may take in the arena."""
        return self.buffer.row_bytes or row_bytes_bound(self.rollout.max_length)

    @property
    def rollout_kl_coef(self) -> float:
        """Weight of the KL penalty inside the reward."""
        if self.rollout.kl_coef is not None:
            return self.rollout.kl_coef
        return 0.01 if self.rollout.algorithm == "ppo" else 0.0

    @property
    def trainer_kl_coef(self) -> float:
        """Weight of the KL in the loss."""
        if self.trainer.kl_coef is not None:
            return self.trainer.kl_coef
        return 0.01 if self.rollout.algorithm == "grpo" else 0.0

    @property
    def rows_per_version(self) -> int:
        """Rows that all ranks train between two published versions."""
        trainer = self.trainer
        return self.sample_batch_size * trainer.world_size * trainer.gradient_accumulation_steps * trainer.publish_every

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Config:
        if found := conflicts(self):
            text = "; ".join(f"{conflict.keys[0]}: {conflict.message}" for conflict in found)
            raise PydanticCustomError("conflict", "{text}", {"text": text})
        return self


def identity_of(config: Config) -> str:
    """Return a digest of everything that makes two runs the same run: models, prompts, seed, algorithm and batches."""
    parts = (
        config.daemon.seed, config.model.model_dump_json(), config.prompts.model_dump_json(), config.rollout.algorithm,
        config.rollout.num_generations, config.rollout.max_length, config.sample_batch_size, config.prompts_per_ticket,
        config.trainer.world_size, config.trainer.kind, config.buffer.arena_bytes,
    )  # fmt: skip
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
