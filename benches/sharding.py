"""Memory of trainer ranks with whole models and with shards, against `rlhfd plan`; time of a publish.

A random Llama is trained by two ranks on CPUs, each a process: whole on each, then sharded. Each takes steps of GRPO on
made-up rows and publishes into /dev/shm after each, as the daemon's ranks do, in a thread beside the next step: the
sharded ones weights and training state, the whole ones weights alone, to save memory. A thread of each rank reads the
process's memory every few milliseconds. It takes 20 GB.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benches.measure import watching
from benches.report import ROOT, Section, Table
from pipeline.config.plan import models_of, needs, process_bytes
from pipeline.config.schema import Config
from pipeline.experience.types import Experience
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import whole_models
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.sharding.models import sharded_models
from pipeline.trainer.state import Progress, tensors_of

RANKS = 2
STEPS = 5
# The first version is published in place; the second one's thread is waited for in the third step.
_FIRST_BESIDE = 2
PROMPT_TOKENS = 16
_READ_EVERY_S = 0.005
_CPU = torch.device("cpu")


class Shape(NamedTuple):
    """Sizes of the model and of a rank's batch."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    rows: int
    tokens: int


SMALL = Shape(hidden=512, inner=1408, layers=8, vocabulary=8192, rows=4, tokens=64)
LARGE = Shape(hidden=1024, inner=2816, layers=24, vocabulary=32_000, rows=4, tokens=64)
"""The second has 374 M parameters."""


class Memory:
    """The largest memory of this process since `begin`, in bytes.

    Attributes:
        own: Memory that is not shared: that of RssAnon and RssFile.
        resident: All resident memory, with the pages of shared memory that are mapped (VmRSS).
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the largest values."""
        self.own = self.resident = 0

    def now(self) -> tuple[int, int]:
        """Return own and resident memory."""
        found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        anonymous, file, whole = (int(found[key].split()[0]) << 10 for key in ("RssAnon", "RssFile", "VmRSS"))
        return anonymous + file, whole

    def look(self) -> None:
        """Read once."""
        own, resident = self.now()
        self.own, self.resident = max(self.own, own), max(self.resident, resident)


def configured(model: Path, shape: Shape, *, of_model: Mapping[str, object] | None = None, **trainer: object) -> Config:
    """Return the configuration of a run that trains a model on rows of a shape, with these keys of its trainer."""
    return Config.model_validate(
        {
            "model": {"actor": str(model), **(of_model or {})},
            "trainer": {"warmup_steps": 0, "decay_steps": 0, **trainer},
            "rollout": {"max_length": shape.tokens},
            "buffer": {"sample_batch_size": shape.rows},
        }
    )


def _of_ranks(model: Path, shape: Shape, sharding: str) -> Config:
    """Return the configuration of the run whose ranks are measured."""
    # Two micro-batches: gradients of the first exist beside the activations of the second. Without the training state
    # of whole ranks in shared memory: both together take 20 GB.
    return configured(
        model, shape, world_size=RANKS, sharding=sharding, micro_batch_size=shape.rows // 2,
        keep_state="disk" if sharding == "none" else "memory",
    )  # fmt: skip


def write_model(folder: Path, shape: Shape) -> int:
    """Write a random Llama; return its parameters."""
    from benches.llama import llama

    sizes = {"intermediate_size": shape.inner, "num_attention_heads": shape.hidden // 64}
    model = llama(shape.hidden, shape.layers, shape.vocabulary, **sizes)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def rows_of(shape: Shape, seed: int) -> Experience:
    """Return made-up rows of full length."""
    drawn = torch.Generator().manual_seed(seed)
    attention_mask = torch.ones(shape.rows, shape.tokens, dtype=torch.int64)
    return made_up(attention_mask, PROMPT_TOKENS, shape.vocabulary, drawn)


def made_up(attention_mask: Tensor, prompt_tokens: int, vocabulary: int, drawn: torch.Generator) -> Experience:
    """Return made-up rows where a mask ``(B, S)`` has tokens, behind the columns of prompts actions."""
    sequences = torch.randint(3, vocabulary, attention_mask.shape, generator=drawn) * attention_mask
    action_mask = attention_mask[:, prompt_tokens:].bool()
    log_probs = torch.full(action_mask.shape, -float(torch.tensor(vocabulary).log()))
    return Experience(
        sequences=sequences,
        action_log_probs=log_probs,
        attention_mask=attention_mask,
        action_mask=action_mask,
        values=None,
        base_action_log_probs=log_probs,
        advantages=torch.randn(len(sequences), generator=drawn)[:, None].expand(action_mask.shape).contiguous(),
        reward=torch.rand(len(sequences), generator=drawn),
        kl=torch.zeros_like(log_probs),
    )


def _be_rank(rank: int, shape: Shape, sharding: str, folder: Path, shared: Path) -> None:
    """Train on one rank and print what it held and how long it took, as JSON."""
    torch.set_num_threads(1)
    config = _of_ranks(folder / "model", shape, sharding)
    store = f"file://{folder}/ranks-{sharding}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    found: dict[str, Any] = {"step_s": [], "waited_s": []}
    memory = Memory()
    with watching(memory.look, _READ_EVERY_S):
        found["bare"] = memory.now()[0]
        models = sharded_models(config, _CPU) if config.shards_trainer else whole_models(config, _CPU)
        found["load"] = memory.own
        learner = Learner(
            config.trainer, "grpo", models["actor"], kl_coef=config.trainer_kl_coef, process_group=dist.group.WORLD
        )
        publisher = _Publisher(config, models["actor"], shared)
        for step in range(STEPS):
            memory.begin()
            started_s, waited_s = time.perf_counter(), publisher.waited_s
            rows = rows_of(shape, seed=step * RANKS + rank)
            learner.update([rows], before_change=publisher.finish)
            publisher.publish(step, tensors_of(learner, Progress(step)))
            found["step_s"].append(time.perf_counter() - started_s)
            found["waited_s"].append(publisher.waited_s - waited_s)
            found["own"], found["resident"] = memory.own, memory.resident
        publisher.finish()
        dist.barrier()
        found["between"], found["between_resident"] = memory.now()
    dist.destroy_process_group()
    print(json.dumps(found))


class _Connection:
    """The part of a connection to the daemon that a publish needs."""

    def __init__(self, weights_path: Path, weight_slots: int) -> None:
        self.rank, self.remote = dist.get_rank(), None
        self.weights_path = weights_path
        self.versions = PolicyVersions(weights_path, weight_slots=weight_slots)


class _Publisher:
    """Publishes versions with the training state as `pipeline.trainer.saving.publishing` does.

    Attributes:
        waited_s: Seconds that the steps have waited for publishes.
    """

    def __init__(self, config: Config, actor: Any, shared: Path) -> None:
        self.waited_s = 0.0
        connection: Any = _Connection(shared / "weights", config.trainer.weight_slots)
        self._models = RankModels(config, {"actor": actor}, connection, _CPU)
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[Any] | None = None

    def publish(self, version: int, state: dict[str, Any]) -> None:
        """Publish a version: the first one in place, the others in a thread."""
        if not self._models.publishes:
            return
        started_s = time.perf_counter()
        write = self._models.writing(WeightsVersion(version), state if self._models.is_sharded else None)
        if version == 0:
            write()
        else:
            self._written = self._thread.submit(write)
        self.waited_s += time.perf_counter() - started_s

    def finish(self) -> None:
        """Wait for the thread."""
        started_s = time.perf_counter()
        if self._written is not None:
            self._written.result()
        self._written = None
        self.waited_s += time.perf_counter() - started_s


def measure(shape: Shape, sharding: str, folder: Path) -> dict[str, Any]:
    """Return what the ranks held and how long they took: lists with an element a rank, and /dev/shm.

    Args:
        shape: Sizes of the model in ``folder/model``, and of the batches.
        sharding: "none" or "full".
        folder: Folder of the model.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        command = [sys.executable, "-m", "benches.sharding"]
        ranks = [
            subprocess.Popen(
                [*command, json.dumps([rank, shape, sharding, str(folder), shared])], cwd=ROOT, stdout=subprocess.PIPE
            )
            for rank in range(RANKS)
        ]
        try:
            found = [json.loads(rank.communicate(timeout=1200)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        held = sum(path.stat().st_blocks * 512 for path in Path(shared).iterdir())
    return {**{key: [one[key] for one in found] for key in found[0]}, "shared": held}


class Compared(NamedTuple):
    """The largest own memory of a rank and the bytes in /dev/shm, measured and planned, and times of a step."""

    rank_bytes: int
    planned_rank_bytes: int
    shared_bytes: int
    planned_shared_bytes: int
    step_s: float
    waited_share: float


def compared(shape: Shape, sharding: str, folder: Path) -> Compared:
    """Measure a run and plan it; ``folder/model`` holds the model."""
    found = measure(shape, sharding, folder)
    config = _of_ranks(folder / "model", shape, sharding)
    planned = needs(config, models_of(config), on_cards=False)
    return Compared(
        rank_bytes=max(found["own"]),
        planned_rank_bytes=sum(planned.rank.values()) + process_bytes(config, "trainer"),
        shared_bytes=found["shared"],
        planned_shared_bytes=planned.shared["weights"] + planned.shared["training state"],
        step_s=statistics.median(found["step_s"][0][_FIRST_BESIDE:]),
        waited_share=statistics.median(
            waited_s / step_s
            for times in zip(found["step_s"], found["waited_s"], strict=True)
            for step_s, waited_s in list(zip(*times, strict=True))[_FIRST_BESIDE:]
        ),
    )


def run(*, quick: bool) -> Sequence[Section]:
    """Measure ranks with whole models, then with shards."""
    shape = SMALL if quick else LARGE
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        parameters = write_model(folder / "model", shape)
        found = {sharding: compared(shape, sharding, folder) for sharding in ("none", "full")}
    rows = [
        (
            f'trainer.sharding = "{sharding}"',
            f"{one.rank_bytes / 1e9:.2f} GB",
            f"{one.planned_rank_bytes / 1e9:.2f} GB ({one.rank_bytes / one.planned_rank_bytes - 1:+.0%})",
            f"{one.rank_bytes / found['none'].rank_bytes:.0%}",
            f"{one.shared_bytes / 1e9:.2f} GB",
            f"{one.planned_shared_bytes / 1e9:.2f} GB",
            f"{one.step_s:.1f} s",
            f"{one.waited_share:.1%}",
        )
        for sharding, one in found.items()
    ]
    text = (
        f"A Llama of {parameters / 1e6:.0f} M parameters, float32, on {RANKS} ranks of a thread each; {shape.rows} rows"
        f" of {shape.tokens} tokens a rank, in two micro-batches. Memory is the largest of any rank in a step beside"
        " the publish of the one before, without the mapped pages of /dev/shm. To save memory whole ranks publish"
        ' weights alone (`trainer.keep_state = "disk"`), sharded ones the training state too: /dev/shm and seconds'
        " a step of the two are of different work."
    )
    header = (
        "way", "a rank", "by `rlhfd plan`", "of whole ranks", "/dev/shm", "by `rlhfd plan`", "a step",
        "waits for a publish",
    )  # fmt: skip
    return [Section("sharding", "Memory of a trainer rank, whole and sharded", text, [Table(header, rows)])]


if __name__ == "__main__":
    number, sizes, kind, *folders = json.loads(sys.argv[1])
    _be_rank(number, Shape(*sizes), kind, *map(Path, folders))
