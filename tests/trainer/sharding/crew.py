"""Ranks of a sharded trainer, each a process, that load, step, publish and save a small model, and report."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.config.schema import Config, TrainerConfig
from pipeline.config.sections import ModelConfig
from pipeline.errors import CheckpointError
from pipeline.models import chunked_log_probs
from pipeline.models.fused_kernels import fuse_norms
from pipeline.models.loading import load_actor, load_critic
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import Saved, adapt, adapter_of
from pipeline.models.weights.store import joined
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.checkpoints import save_checkpoint
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import load_reference
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.sharding.checkpoints import load_shards, save_together, state_shards
from pipeline.trainer.sharding.models import fill, load_actor_shards, load_critic_shards, shards_of
from pipeline.trainer.sharding.ranks import RankGroup
from pipeline.trainer.sharding.replicas import Replica
from pipeline.trainer.sharding.tensor_files import HERE
from pipeline.trainer.state import Progress, tensors_of
from tests.support import forked_ranks, tiny
from tests.trainer.sharding.wire import far_shards
from tests.trainer.test_checkpoints import Tokenizer
from tests.trainer.test_learner import experience_of, rows_of

CPU = torch.device("cpu")
TRAINER = TrainerConfig(warmup_steps=0, decay_steps=0, critic_warmup_steps=0, learning_rate=1e-3, micro_batch_size=2)
BY_TOKENS = TRAINER.model_copy(
    update={"micro_batch_size": None, "micro_batch_tokens": 20, "activation_checkpointing": True, "entropy_coef": 0.01}
)
"""Micro-batches cut by tokens, checkpointed activations, and a loss of two results of a pass."""
OF_SEVERAL_UPDATES = TRAINER.model_copy(
    update={"epochs": 2, "mini_batches": 3, "target_kl": 0.05, "kl_coef_target": 0.001}
)
PACKED = TRAINER.model_copy(update={"packing": True, "activation_checkpointing": True, "normalize_values": True})
ROWS = {1: [slice(8)], 2: [slice(5), slice(5, 8)], 4: [slice(3), slice(3, 4), slice(4, 7), slice(7, 8)]}
"""Rows of each rank: ranks have different numbers of micro-batches."""
STEPS = 3
MODELS = {
    "grpo": ModelConfig(),
    "ppo": ModelConfig(),
    "tokens": ModelConfig(),
    "ppo-tokens": ModelConfig(),
    "updates": ModelConfig(),
    "packed": ModelConfig(),
    "ppo-packed": ModelConfig(),
    "lora": ModelConfig(lora_rank=2, lora_kind="rslora"),
    "bfloat16": ModelConfig(dtype="bfloat16"),
    "lora-head": ModelConfig(lora_rank=2, lora_targets=["lm_head", "q_proj"]),
    "lora-bfloat16": ModelConfig(dtype="bfloat16", lora_rank=2),
    "reference": ModelConfig(),
    "reference-packed": ModelConfig(),
    "reference-bfloat16": ModelConfig(dtype="bfloat16"),
    "lora-reference": ModelConfig(lora_rank=2),
}
CASES = {
    "2": list(MODELS),
    "4": ["grpo", "ppo", "lora", "tokens", "ppo-packed", "reference"],
    "2x2": ["ppo", "lora-bfloat16"],
    "2x1": ["ppo"],
}
"""The cases of each crew: a number of ranks, or of replicas and the ranks of each."""
VARIANTS = ("tokens", "packed", "lora-bfloat16")
"""Cases of two ranks whose code is that of `ppo-tokens`, of `ppo-packed`, and of two replicas of `lora-bfloat16`."""


def write_model(folder: Path, name: str) -> None:
    """Write the model of a case: with tied embeddings, and of odd sizes, in two of them.

    That of packed rows slides a window: its passes with shared prompts are refused in a layer, which has shards.
    """
    changes = {"tie_word_embeddings": True, "intermediate_size": 23} if name in ("grpo", "lora-head") else {}
    model = tiny.mistral(1) if "packed" in name else tiny.llama(1, **changes)
    if "bfloat16" in name:
        # Small weights: rounding is then not amplified, and gradients of rows in other micro-batches agree.
        for parameter in model.parameters():
            parameter.data *= 0.3 if parameter.dim() > 1 else 1
    model.save_pretrained(folder)
    if name == "lora":
        start = adapt(copy.deepcopy(model), MODELS[name], seed=9)
        with torch.no_grad():
            for parameter in adapter_of(start).values():
                parameter += 0.05
        Saved(start, MODELS[name]).save_pretrained(folder / "start")
    if "reference" in name:
        other = model if "lora" in name else tiny.llama(2)
        if "bfloat16" in name:
            other = copy.deepcopy(model)
            for parameter in other.parameters():
                parameter.data *= 0.9
        other.save_pretrained(folder / "reference")


def algorithm_of(name: str) -> Any:
    return "ppo" if name.startswith("ppo") else "grpo"


def settings_of(folder: Path, name: str) -> ModelConfig:
    """Return the settings of a case: adapters begin with those of another model in the first case of them."""
    start = folder / "start" / "adapter"
    return MODELS[name].model_copy(update={"lora_adapter": str(start)}) if start.is_dir() else MODELS[name]


def whole_models(folder: Path, name: str) -> dict[str, Any]:
    settings = settings_of(folder, name)
    actor = load_actor(folder, dtype=settings.dtype, device=CPU)
    models: dict[str, Any] = {"actor": actor}
    if name.startswith("ppo"):
        models["critic"] = load_critic(folder, dtype=settings.dtype, device=CPU)
    adapt(actor, settings, seed=5)
    return models


def sharded_models(folder: Path, name: str, replica: Replica) -> dict[str, Any]:
    settings = settings_of(folder, name)
    models: dict[str, Any] = {
        "actor": load_actor_shards(folder, dtype=settings.dtype, device=CPU, replica=replica, lora=settings, seed=5)
    }
    if name.startswith("ppo"):
        models["critic"] = load_critic_shards(folder, dtype=settings.dtype, device=CPU, replica=replica)
    return models


def reference_of(folder: Path, name: str, actor: nn.Module) -> nn.Module | None:
    """Return a rank's reference as its process loads it."""
    settings = MODELS[name]
    if "reference" not in name:
        return None
    reference = folder if settings.lora_rank else folder / "reference"
    model = {**settings.model_dump(), "actor": str(folder), "reference": str(reference), "reference_device": "trainer"}
    trainer = {"world_size": dist.get_world_size(), "sharding": "full"}
    return load_reference(Config.model_validate({"model": model, "trainer": trainer}), actor, CPU)


def new_learner(
    models: dict[str, Any], name: str, process_group: Any = None, reference: nn.Module | None = None
) -> Learner:
    trainer = OF_SEVERAL_UPDATES if name == "updates" else TRAINER
    return Learner(
        BY_TOKENS if name.endswith("tokens") else PACKED if name.endswith("packed") else trainer,
        algorithm_of(name),
        models["actor"],
        models.get("critic"),
        kl_coef=0.0 if name.startswith("ppo") else 0.05,
        process_group=process_group,
        reference=reference,
    )


def write_experience(folder: Path, name: str) -> None:
    """Write the rows of each step, sampled by a model that is a little different from the trained one."""
    models = whole_models(folder / name, name)
    models["actor"].float()
    reference = None
    if "reference" in name:
        reference = load_actor(folder / name / "reference", dtype=MODELS[name].dtype, device=CPU)
    for step in range(STEPS):
        experience = experience_of(models["actor"], algorithm_of(name), critic=models.get("critic"), seed=step)
        assert experience.action_log_probs is not None
        noise = torch.randn(experience.action_log_probs.shape, generator=torch.Generator().manual_seed(step))
        experience.action_log_probs += 0.1 * noise
        if reference is not None and experience.action_mask is not None:
            with torch.no_grad():
                mask = experience.action_mask
                rows = experience.sequences, experience.attention_mask, mask.shape[1]
                experience.base_action_log_probs = action_log_probs(reference, *rows).masked_fill(~mask, 0.0)
        torch.save(experience, folder / f"{name}-{step}.pt")


def steps(
    learner: Learner, folder: Path, name: str, rows: slice, *, with_reference: bool = True
) -> list[dict[str, Any]]:
    found = []
    for step in range(STEPS):
        experience = torch.load(folder / f"{name}-{step}.pt", weights_only=False)
        if not with_reference:
            experience.base_action_log_probs = None
        stats = learner.update([rows_of(experience, rows)])
        found.append(
            {"loss": stats.loss, "norm": stats.gradient_norm, "critic_norm": stats.critic_gradient_norm or 0.0}
        )
    return found


def whole_tensors(models: dict[str, nn.Module], group: RankGroup) -> dict[str, Tensor]:
    """Return all tensors of sharded models on rank 0."""
    found = {}
    for model, module in models.items():
        for name, shard in shards_of(module).items():
            whole = group.whole(shard._replace(dtype=shard.local.dtype))
            if whole is not None:
                found[f"{model}.{name}"] = whole.clone()
    return found


@contextlib.contextmanager
def replica_sums(replica: Replica) -> Iterator[list[int]]:
    """Count the elements of each gradient that is summed over replicas."""
    found: list[int] = []
    real = dist.all_reduce
    across = replica.mesh.get_group("replicate") if replica.group is not None else None

    def all_reduce(tensor: Tensor, *arguments: Any, **settings: Any) -> Any:
        if across is not None and settings.get("group") is across:
            found.append(tensor.numel())
        return real(tensor, *arguments, **settings)

    dist.all_reduce = all_reduce
    try:
        yield found
    finally:
        dist.all_reduce = real


def ranks_of(crew: str) -> tuple[int, int]:
    """Return the replicas of a crew, and the ranks of each."""
    replicas, _, ranks = crew.rpartition("x")
    return int(replicas or 1), int(ranks)


def cases_of(crew: str, folder: Path) -> list[str]:
    """Return the cases that a crew runs, those of `VARIANTS` where the folder holds the file `variants`."""
    left_out = VARIANTS if crew == "2" and not (folder / "variants").exists() else ()
    return [name for name in CASES[crew] if name not in left_out]


def start(folder: Path, crew: str) -> dict[str, Any]:
    """Run the cases on ranks of their own; return rank 0's results, by case."""
    # Ranks would wait for the dead ones of an earlier try that are written there.
    (folder / f"ranks-{crew}").unlink(missing_ok=True)
    forked_ranks.run(math.prod(ranks_of(crew)), f"{__name__}:rank_of_{crew}", folder, timeout_s=600)
    results: dict[str, Any] = torch.load(folder / f"results-{crew}.pt", weights_only=False)
    return results


def rank_of_2(rank: int, directory: str) -> None:
    _rank_main(rank, "2", directory)


def rank_of_4(rank: int, directory: str) -> None:
    _rank_main(rank, "4", directory)


def rank_of_2x2(rank: int, directory: str) -> None:
    _rank_main(rank, "2x2", directory)


def rank_of_2x1(rank: int, directory: str) -> None:
    _rank_main(rank, "2x1", directory)


def _rank_main(rank: int, crew: str, directory: str) -> None:
    torch.set_num_threads(1)
    folder = Path(directory)
    replicas, ranks = ranks_of(crew)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks-{crew}", rank=rank, world_size=replicas * ranks)
    try:
        replica = Replica.of(CPU, replicas)
        results = {name: _case(name, folder, replica, crew) for name in cases_of(crew, folder)}
        # Four ranks resume what two have written, and what two replicas have.
        written_by = {"4": "2"}.get(crew, crew)
        for name in CASES[crew] if crew != "2" and (crew != "4" or (folder / "results-2.pt").exists()) else ():
            results[name]["resumed"] = resumed(name, folder, Replica.of(CPU), written_by)
        if rank == 0:
            torch.save(results, folder / f"results-{crew}.pt")
    finally:
        dist.destroy_process_group()
    # As each role ends (`child_entry.leave`): threads of torch that still run at the interpreter's end abort it.
    os._exit(0)


def _case(name: str, folder: Path, replica: Replica, crew: str) -> dict[str, Any]:
    # Several chunks of a few positions, of which each would gather the head and reduce its gradient.
    chunked_log_probs.CHUNK_ELEMENTS = 3 * tiny.VOCABULARY_SIZE if name.endswith("tokens") else 2**26
    group, every = RankGroup(CPU, process_group=replica.group), RankGroup(CPU)
    models = sharded_models(folder / name, name, replica)
    reference = reference_of(folder / name, name, models["actor"])
    if name.endswith("packed"):
        # As on a card, where shards of norms are gathered, too.
        assert fuse_norms(models.values())
    learner = new_learner(models, name, dist.group.WORLD, reference)
    loaded = whole_tensors(models, group)
    rows = ROWS[every.world_size][every.rank]
    with replica_sums(replica) as sums:
        found = steps(learner, folder, name, rows, with_reference=reference is None)
    found = {"loaded": loaded, "steps": found, "weights": whole_tensors(models, group), "sums": sums}
    if reference is not None:
        held = [shard.local for shard in shards_of(reference).values()]
        found["reference"] = sum(shard.numel() for shard in held), {shard.dtype for shard in held}
    place = folder / f"{name}-{crew}"
    place.mkdir(exist_ok=True)
    state = tensors_of(learner, Progress(STEPS, 7, 11))
    found["digests"] = every.gather([_digest(_copies(models, learner.tensors()))])
    found |= _published(models, state, place, replica) | _saved(models, state, place, name, replica)
    return found | {"held": sum(shard.local.numel() for shard in shards_of(models["actor"]).values())}


def _is_far(replica: Replica) -> bool:
    """Return whether this rank is on another machine: of two ranks the second, and every replica but the first."""
    return not replica.is_published or (dist.get_world_size() == 2 and replica.shard == 1)


def _published(models: dict[str, Any], state: dict[str, Tensor], place: Path, replica: Replica) -> dict[str, Any]:
    """Publish the models, set all to 0, and restore all; return rank 0's findings."""
    before, group = _copies(models, state), RankGroup(CPU)
    far = far_shards(place / "weights", replica.shard) if _is_far(replica) else None
    connection: Any = SimpleNamespace(rank=group.rank, weights_path=place / "weights", remote=far)
    ranks, again = (RankModels(Config(), models, connection, CPU) for _ in range(2))
    shards = joined({model: shards_of(module, published=True) for model, module in models.items()})
    first = ranks.writing(WeightsVersion(1, trained_through=5), state)() if ranks.publishes else None
    found = group.broadcast([0, 0] if first is None else first.age)
    first = first or WeightsVersion(found[0], history=found[1])
    # Rank 0 turns the page once it has gathered the digests; the others do not wait for that.
    group.agree(True)
    _clear(models, state, shards)
    is_restored = again.restore(first, state)
    different = _different(before, _copies(models, state), group)
    # The second publish is that of a successor.
    second = again.writing(WeightsVersion(2, trained_through=6), state)() if again.publishes else None
    group.agree(True)
    _, held = again.held(state) if again.publishes else (False, None)
    if held is not None:
        note = CheckpointNote("", STEPS, STEPS, 11, False, "", "", {})
        again.save(functools.partial(save_checkpoint, place / "held", note, tokenizer=Tokenizer()), None, held)
        assert held.is_next() is False
    group.agree(True)
    ranks.close()
    again.close()
    return {"restored": group.agree(is_restored), "different": different, "versions": [first, second]}


def _saved(
    models: dict[str, Any], state: dict[str, Tensor], place: Path, name: str, replica: Replica
) -> dict[str, Any]:
    """Save the models, set all to 0, and load all; then fail to save. Return rank 0's findings."""
    before, group, every = _copies(models, state), RankGroup(CPU, process_group=replica.group), RankGroup(CPU)
    note = CheckpointNote("", STEPS, STEPS, 11, False, "", "", {})
    write = functools.partial(save_checkpoint, place / "checkpoints", note, tokenizer=Tokenizer())
    path = save_together(group, models, state, MODELS[name], write) if replica.is_published else None
    every.agree(True)
    _clear(models, state, joined({model: shards_of(module) for model, module in models.items()}))
    if name.startswith("lora"):
        # The base model is the one of its own folder.
        fill(models["actor"], place.parent / name, "model.actor", without=adapter_of(models["actor"]))
    files = far_shards(place / "weights", replica.shard) if _is_far(replica) else HERE
    load_shards(place / "checkpoints" / "step-000003", "trainer_state.safetensors", models, state, files)
    different = _different(before, _copies(models, state), every)
    failures = _failures(models, state, name, group) if replica.is_published else []
    return {"different_again": different, "path": path, "failures": failures}


def resumed(name: str, folder: Path, replica: Replica, saved_by: str) -> set[str]:
    """Load the checkpoint that another crew has written; return the names that differ from a whole one's."""
    group = RankGroup(CPU)
    models = sharded_models(folder / name, name, replica)
    learner = new_learner(models, name, dist.group.WORLD)
    state = tensors_of(learner, Progress())
    checkpoint = folder / f"{name}-{saved_by}" / "checkpoints" / "step-000003"
    load_shards(checkpoint, "trainer_state.safetensors", models, state)
    whole = load_file(checkpoint / "trainer_state.safetensors")
    return {key for key, shard in state_shards(state, models).items() if not _equal(group, shard, whole[key])}


def _equal(group: RankGroup, shard: Any, expected: Tensor) -> bool:
    found = group.whole(shard._replace(dtype=shard.local.dtype))
    return found is None or torch.equal(found, expected)


def _failures(models: dict[str, Any], state: dict[str, Tensor], name: str, group: RankGroup) -> list[str]:
    """Let rank 0 fail after the actor; return every rank's error."""

    def write(*, actor: Any, critic: Any, state: Any) -> Path:
        with tempfile.TemporaryDirectory() as folder:
            actor.save_pretrained(folder)
        raise CheckpointError("the disk is full")

    try:
        save_together(group, models, state, MODELS[name], write)
    except CheckpointError as error:
        # The ranks that save together are the first ones.
        messages = [str(error)]
        for rank in range(1, group.world_size):
            if dist.get_rank() == rank:
                dist.send_object_list(messages, dst=0)
            elif dist.get_rank() == 0:
                received = [None]
                dist.recv_object_list(received, src=rank)
                messages += received
        return messages
    return []


def _copies(models: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    shards = {f"{model}.{name}": shard for model in models for name, shard in shards_of(models[model]).items()}
    return {**{name: shard.local.clone() for name, shard in shards.items()}, **{n: t.clone() for n, t in state.items()}}


def _clear(models: dict[str, Any], state: dict[str, Tensor], shards: dict[str, Any]) -> None:
    for tensor in [*state.values(), *(shard.local for shard in shards.values())]:
        tensor.zero_()


def _digest(tensors: dict[str, Tensor]) -> int:
    content = b"".join(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in sorted(tensors))
    return xxhash.xxh3_64_intdigest(content)


def _different(first: dict[str, Tensor], second: dict[str, Tensor], group: RankGroup) -> list[set[str]]:
    """Return the names of the tensors that differ, for each rank."""
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, {name for name in first if not torch.equal(first[name], second[name])})
    return found
