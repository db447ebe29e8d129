"""Messages between a worker and the process of its vLLM engine.

The worker sends the settings, then requests and orders; the engine answers each order once and reports its
steps.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.models.weights.tensor_specs import TensorSpec
from pipeline.rollout.generation.interface import EngineLoad, Sampling


class Lora(msgspec.Struct, frozen=True):
    """Adapters in place of whole weights: rank, alpha, and the last part of the names of the adapted layers."""

    rank: int
    alpha: float
    targets: list[str]


class Sight(msgspec.Struct, frozen=True):
    """A model that takes images: its type, the token of its images, and the patches along a side of one token."""

    kind: str
    image_token: int
    merge: int


class Settings(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Settings of the engine; see `pipeline.rollout.generation.vllm.engine` for their meaning.

    They are the first message. The process begins with them, too, then without those of the model: `lora`, `sight`.
    """

    directory: str
    dtype: str
    on_cpu: bool
    max_length: int
    max_rows: int
    cache_bytes: int
    log_level: str
    log_json: bool
    title: str
    lora: Lora | None = None
    sight: Sight | None = None
    sleeps: bool = False
    batch_invariant: bool = False
    tensor_parallel: int = 1
    scratch: str = ""
    quantization: str = "none"


class Images(msgspec.Struct, frozen=True, array_like=True):
    """The images of a prompt, at least one.

    Attributes:
        path: A file with the pixels of all images, one after the other.
        pixels: Their place in it.
        grids: Time, height and width of each image, in patches.
        spots: The first place in the prompt and the number of each image's tokens.
        hashes: Hash of each image; equal images have equal hashes.
    """

    path: str
    pixels: list[TensorSpec]
    grids: list[tuple[int, int, int]]
    spots: list[tuple[int, int]]
    hashes: list[str]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request; each seed is that of one response.

    Stop strings stand beside the sampling parameters: they are found by the tokenizer of the model's folder.
    """

    key: int
    prompt: list[int]
    seeds: list[int]
    max_new_tokens: int
    sampling: Sampling
    log_probs: bool
    images: Images | None = None
    prompt_log_probs: bool = False
    stop_strings: tuple[str, ...] = ()


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop these requests."""

    keys: list[int]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the newest version, or the version of a given age, out of a weights file."""

    path: str
    age: tuple[int, int] | None


class Take(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take tensors out of a file of no other content."""

    path: str
    places: list[TensorSpec]
    version: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take no step until `Resume`."""


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go on after `Pause`."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the memory of the card back; no request is in hand, and none comes before `Wake`."""


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take memory of the card again, for the weights that come next."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine is ready: tokens that its cache holds, and tokens of its model's vocabulary."""

    cache_tokens: int
    vocabulary: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One ended response; `spans` are (version, start, end)."""

    token_ids: list[int]
    log_probs: list[float] | None
    stopped: bool
    spans: list[tuple[int, int, int]]
    prompt_log_probs: list[float] | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """An ended request."""

    key: int
    rows: list[Row]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Steps with progress since the last report.

    Attributes:
        ended: Requests that have ended.
        taken: Requests received since the engine's start.
        load: The work in hand of the process, and its work since its start; its room is not told.
    """

    ended: list[Ended]
    taken: int
    load: EngineLoad


class Updated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Fetch` and `Take`: the version that the engine computes with now."""

    version: int
    history: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Pause`, `Sleep` and `Wake`."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An error: of the configuration, of weights that do not fit, of a version that is not held, or of vLLM.

    After each but "version" the process ends.
    """

    kind: Literal["config", "mismatch", "version", "engine"]
    message: str


Order = Settings | Submit | Cancel | Fetch | Take | Pause | Resume | Sleep | Wake
Report = Ready | Stepped | Updated | Done | Failed

orders = msgspec.msgpack.Decoder(Order)
reports = msgspec.msgpack.Decoder(Report)
