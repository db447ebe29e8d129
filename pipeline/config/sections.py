"""The base of every section, and the sections of what surrounds a run: HTTP server, samples and cluster."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from pipeline.config.types import AnyPath, Bytes

LIVE: Final[JsonDict] = {"x-reload": "live"}
"""On a field: `rlhfd reload` applies a new value to a running instance. Any other field needs a restart."""


class Section(BaseModel):
    """The base of a section: frozen, without unknown keys, strict."""

    # Strict: "8" for a number or true for 1 is a typing mistake, not an intention.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


class MetricsConfig(Section):
    """The HTTP server of metrics, health and the page."""

    enabled: bool = Field(default=True, description="Whether the HTTP server runs.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the server listens on.")
    port: int = Field(default=9477, ge=0, le=65535, description="TCP port; 0: any free port.")
    page: bool = Field(default=True, description="Whether the server has the page of the run at `/`.")
    tls_cert: AnyPath | None = Field(default=None, description="Certificate chain in PEM; enables TLS.")
    tls_key: AnyPath | None = Field(default=None, description="The certificate's private key, of mode 0600.")
    token_file: AnyPath | None = Field(
        default=None,
        description="File of mode 0600 with a bearer token, which all paths but /healthz and /readyz require.",
        json_schema_extra=LIVE,
    )


class SamplesConfig(Section):
    """Rollouts kept for people to read, on the page and by `rlhfd samples`."""

    per_minute: float = Field(
        default=30.0,
        ge=0,
        le=6000,
        description="Prompts per minute, of all workers together, whose responses are kept; 0: none.",
    )
    bytes: Bytes = Field(
        default=16 << 20,
        ge=1 << 16,
        lt=2**40,
        description="Maximum bytes of the samples in the run's folder; the oldest are removed first.",
    )
    remote: bool = Field(
        default=False,
        description="Whether the page shows samples even if metrics.host is not a loopback address.",
    )


class ClusterConfig(Section):
    """The place of the workers' models: this machine, or a Ray cluster."""

    engine: Literal["local", "ray"] = Field(
        default="local",
        description="Models in the workers' own processes (local), or in actors on any machine of a Ray cluster (ray).",
    )
    address: str = Field(
        default="auto",
        min_length=1,
        description="Ray cluster: host:port of its head, or auto for the cluster that this machine is part of.",
    )
    worker_gpus: float = Field(default=1.0, ge=0, le=1, description="Share of a GPU per actor; 0: actors on CPUs.")
