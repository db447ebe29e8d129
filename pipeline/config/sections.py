"""The base of every section, and the small sections: models, buffer, HTTP server with trackers, samples, cluster."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.config.types import AnyPath, AutoOrBool, Bytes, ClusterAddress, LoraTargets, Source
from pipeline.config.user_modules import missing_package

LIVE: Final[JsonDict] = {"x-reload": "live"}
"""On a field: `rlhfd reload` applies a new value to a running instance. Any other field needs a restart."""


ReferenceDevice = Literal["worker", "trainer", "host"]
RewardTokenizer = Literal["policy", "own"]
ReferenceRole = Literal["worker", "trainer"]

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]

_TRACKERS: Final = {
    "tensorboard": ("tensorboard.summary.writer", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
}
"""Module and package of each tracker."""


class Section(BaseModel):
    """The base of a section: frozen, without unknown keys, strict. The text below a field is the meaning of its key."""

    # Strict: "8" for a number or true for 1 is a typing mistake, not an intention.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the meaning of each key; reads the source, which nothing but a reference page or a schema needs."""
        found: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Section):
                found |= _texts_below_fields(inspect.getsource(base))
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, with the meaning of each key."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for key, text in cls.meanings().items():
            properties[key]["description"] = text
        return schema


def _texts_below_fields(source: str) -> dict[str, str]:
    (of_class,) = ast.parse(source).body
    assert isinstance(of_class, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(of_class.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                found[key] = " ".join(text.split())
    return found


class ModelConfig(Section):
    """The models, each a local directory in transformers' format; none is ever downloaded."""

    actor: Source = "builtin:sort-digits"
    """Directory of the policy and its tokenizer."""
    reference: Source | None = None
    """Directory of the reference model of the KL; left out: the actor with its initial weights."""
    reference_device: ReferenceDevice = "worker"
    """Role that holds the reference and computes its log-probs: each worker, of its rollouts (host: from host memory,
    its decoder layers copied to the card one after the other), or the trainer, of a batch before its step, with
    trainer.sharding sharded as the actor."""
    critic: Source | None = None
    """Directory of the value model (PPO); left out: the actor's backbone with a value head of zeros."""
    reward: Source | None = None
    """Directory of a sequence classification model that scores responses, short for a table [[rewards]] of the name
    model with weight 1; left out: rewards alone."""
    reward_tokenizer: RewardTokenizer = "policy"
    """Tokenizer of the rows that the reward model gets: policy, the actor's token ids, or own: each row is decoded and
    encoded again with the tokenizer and the chat template of `model.reward`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the models."""
    float32_logits: bool | None = None
    """Whether the logits of models of 16 bits are computed in float32; left out: on a GPU, where the importance ratio
    of the unchanged policy spreads by more than 0.02 (kind = external: no)."""
    compile: AutoOrBool = "auto"
    """Whether decoder layers are compiled by torch.compile, in training and log-prob passes of trainer and workers;
    auto: the trainer's on a GPU, if a trial at the start is faster with it; a model that cannot be is computed as
    before, and the log says why."""
    lora_rank: int = Field(default=0, ge=0, le=4096)
    """Rank of LoRA: only the actor's adapters are trained and published; 0: off."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA's alpha: adapters are scaled by alpha / rank."""
    lora_targets: LoraTargets = "all-linear"
    """Last parts of the names of the linear layers that get adapters, or all-linear: all linear layers of the decoder
    layers."""
    lora_kind: Literal["lora", "rslora"] = "lora"
    """Scale of the adapters: alpha / rank (lora), or alpha / sqrt(rank) (rslora)."""
    lora_adapter: Source | None = None
    """Directory of an adapter in peft's format with which the run begins; left out: adapters that change nothing at
    first."""


class MetricsConfig(Section):
    """The HTTP server of metrics, health and the page; the trackers."""

    enabled: bool = True
    """Whether the HTTP server runs."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the server listens on."""
    port: int = Field(default=9477, ge=0, le=65535)
    """TCP port; 0: any free port."""
    tls_cert: AnyPath | None = None
    """Certificate chain in PEM; enables TLS."""
    tls_key: AnyPath | None = None
    """The certificate's private key, of mode 0600."""
    token_file: AnyPath | None = Field(default=None, json_schema_extra=LIVE)
    """File of mode 0600 with a bearer token, which all paths but /healthz and /readyz require."""
    tracker: list[TrackerName] = Field(default=[])
    """Trackers that get steps, evaluations and samples, each from a process of its own: tensorboard, wandb, trackio,
    mlflow."""
    tracker_project: str = Field(default="rlhfd", min_length=1, max_length=128)
    """Project of the run in the trackers."""


class SamplesConfig(Section):
    """Rollouts kept for people to read, on the page and by `rlhfd samples`."""

    per_minute: float = Field(default=30.0, ge=0, le=6000)
    """Prompts per minute, of all workers together, whose responses are kept; 0: none."""
    remote: bool = False
    """Whether the page shows samples even if metrics.host is not a loopback address."""


class ClusterConfig(Section):
    """The place of the workers' models: this machine, or a Ray cluster."""

    engine: Literal["local", "ray"] = "local"
    """Models in the workers' own processes (local), or in actors on any machine of a Ray cluster (ray)."""
    address: ClusterAddress = "auto"
    """Ray cluster: host:port of its head, or auto for the cluster that this machine is part of."""
    worker_gpus: float = Field(default=1.0, ge=0, le=1)
    """Share of a GPU per actor; 0: actors on CPUs."""


class BufferConfig(Section):
    """The experience buffer between rollout and training."""

    sample_batch_size: int | None = Field(default=None, ge=1, le=2**20)
    """Rows of a rank's batch; left out: 256 (GRPO), 128 (PPO)."""
    limit: int = Field(default=0, ge=0)
    """Maximum number of waiting batches; 0: only staleness and bytes bound them."""
    arena_bytes: Bytes = Field(default=64 << 20, gt=0, lt=2**62)
    """Shared memory for experience, in bytes or as "64MiB", "2GiB"."""
    row_bytes: Bytes | None = Field(default=None, gt=0, lt=2**40)
    """Room reserved per row, in bytes or as "4MiB", for text, pixels and raw images; left out: enough for text of
    rollout.max_length."""
    max_staleness: int = Field(default=1, ge=0, le=1024)
    """Maximum staleness of a trained row, in policy versions; 0: in step."""
    journal_interval_s: float = Field(default=0.0, ge=0)
    """Seconds between snapshots of the buffer's rows in the run's folder, with one more after each checkpoint: the most
    that a crash of the machine costs; 0: no snapshots."""


def missing_tracker(name: str) -> str:
    """Return the line that says what to install for a tracker whose package is not installed; else an empty text."""
    return missing_package(name, *_TRACKERS[name])
