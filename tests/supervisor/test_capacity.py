"""`trainer.sharding = "auto"`: decided by the plan, for a machine."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.cli.status import render
from pipeline.config.losses import worker_holds_actor
from pipeline.config.plan import models_of
from pipeline.config.schema import Config
from pipeline.config.sections import ClusterConfig
from pipeline.errors import ConfigError, counted
from pipeline.supervisor import preflight
from pipeline.supervisor.capacity import machine as machines
from pipeline.supervisor.capacity.budgets import budgets_of, remedies
from pipeline.supervisor.capacity.choices import choice, decided, misfits
from pipeline.supervisor.capacity.machine import Machine, described
from pipeline.supervisor.placement import visible_gpus
from tests.supervisor.test_gpus import FakeNvml, faked
from tests.support import tiny
from tests.support.daemon import EXACT

GB = 10**9
CARDS = Machine(gpus=4, gpu_bytes=80 * GB, ram_bytes=1000 * GB, shm_bytes=500 * GB)


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of these tests hold some megabytes, less than a process takes before its first tensor (test_plan.py)."""
    monkeypatch.setattr("pipeline.config.plan.CONTEXT_BYTES", 0)
    monkeypatch.setattr("pipeline.config.plan.KEPT_SHARE", 0.0)
    monkeypatch.setattr("pipeline.config.plan._GRAPH_BYTES", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capacity")
    tiny.llama(hidden_size=64, intermediate_size=256, num_hidden_layers=8).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def configured(folder: Path, ranks: int = 2, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"actor": str(folder), "dtype": "bfloat16"},
            "trainer": {"world_size": ranks, "micro_batch_size": 1, **trainer},
            "rollout": {"max_length": 16},
        }
    )


def chosen(config: Config, machine: Machine) -> tuple[str, str]:
    found = choice(config, models_of(config), machine)
    return found.config.trainer.sharding, found.reasons["trainer.sharding"]


def with_images(folder: Path, target: Path) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**described, "vision_config": {}}))
    return target


def test_a_worker_of_a_model_that_takes_images_holds_the_actor_beside_vllm(folder: Path, tmp_path: Path) -> None:
    rollout = {"engine": "vllm", "log_probs": "trainer", "max_length": 16}
    text, vision = (
        Config.model_validate({"model": {"actor": str(path)}, "rollout": rollout, "trainer": {"kl_coef": 0.0}})
        for path in (folder, with_images(folder, tmp_path))
    )

    assert (worker_holds_actor(text), worker_holds_actor(vision)) == (False, True)


def test_auto_is_none_where_a_whole_model_fits_beside_each_rank(folder: Path) -> None:
    sharding, reason = chosen(configured(folder), CARDS)

    assert sharding == "none"
    assert reason.startswith("with whole ranks GPU of trainer 0 (2 like it) takes ") and reason.endswith("of 80.0 GB")


def test_auto_is_full_where_a_whole_model_does_not_fit(folder: Path) -> None:
    config = configured(folder)
    small = CARDS._replace(gpu_bytes=18 * models_of(config).actor.parameters)

    sharding, reason = chosen(config, small)

    assert sharding == "full" and "GPU of trainer 0" in reason


def test_on_a_cpu_auto_depends_on_the_memory_of_the_host(folder: Path) -> None:
    config, whole = configured(folder), configured(folder, sharding="none")
    small = models_of(config).actor
    # A billion parameters: the shards of a small model save less than their collectives take.
    large = small._replace(tensors=small.tensors | {"more": (10**9,)})
    models = models_of(config)._replace(actor=large, reference=large)
    machine = CARDS._replace(gpus=0, gpu_bytes=0)
    (needed,) = (budget.total_bytes for budget in budgets_of(whole, models, machine) if budget.holds_ranks)

    fits, lacks = (choice(config, models, machine._replace(ram_bytes=nbytes)) for nbytes in (needed, needed - 1))

    assert fits.config.trainer.sharding == "none" and lacks.config.trainer.sharding == "full"
    assert all(
        found.reasons["trainer.sharding"].startswith("with whole ranks host memory takes ") for found in (fits, lacks)
    )


@pytest.mark.parametrize(
    ("ranks", "trainer", "sharding", "reason"),
    [
        (1, {}, "none", "one rank"),
        (2, {"kind": "external"}, "none", "an external trainer shards its own models"),
        (2, {"sharding": "full"}, "full", "configured"),
        (2, {"sharding": "none"}, "none", "configured"),
    ],
)
def test_what_no_plan_decides_is_settled(
    folder: Path, ranks: int, trainer: dict[str, Any], sharding: str, reason: str
) -> None:
    assert chosen(configured(folder, ranks, **trainer), CARDS._replace(gpu_bytes=1)) == (sharding, reason)


def test_a_vision_language_model_is_never_sharded_by_auto(folder: Path, tmp_path: Path) -> None:
    sharding, reason = chosen(configured(with_images(folder, tmp_path)), CARDS._replace(gpu_bytes=1))

    assert sharding == "none" and reason.endswith("vision-language models are not sharded")


def test_a_model_without_a_plan_is_not_sharded_and_the_reason_is_given(tmp_path: Path) -> None:
    found = decided(configured(tmp_path), {})

    assert (found.config.trainer.sharding, found.reasons["trainer.sharding"]) == (
        "none",
        f"no plan: model.actor: {tmp_path} has no config.json",
    )


def test_the_configuration_is_shown_with_the_choice_and_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "gpus_here", lambda environ: [18 * 527_000] * 4)
    monkeypatch.setattr(machines, "visible_gpus", lambda environ: list("0123"))
    sets = [word for item in ("trainer.world_size=2", "rollout.max_length=16", "trainer.micro_batch_size=1",
                              f"model.actor={folder}", "model.dtype=bfloat16") for word in ("--set", item)]  # fmt: skip

    shown = CliRunner().invoke(main, ["config", "show", "--effective", *sets]).output
    monkeypatch.setattr(machines, "gpus_here", lambda environ: [1_000_000] * 4)
    # The folder has a shell of a model, whose tokenizer is none.
    monkeypatch.setattr(preflight, "findings_of_start", lambda loaded: ([], []))
    own = ("--set", EXACT, "--set", "prompts.path=builtin:sort-digits")
    checked = CliRunner().invoke(main, ["config", "check", *sets, *own]).output

    assert 'sharding = "auto"  # full here: with whole ranks GPU of trainer 0 (2 like it) takes ' in shown
    assert "note: rlhfd plan: " in checked and "to fit: " in checked


def test_a_check_without_cards_has_no_notes_of_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "visible_gpus", lambda environ: [])
    monkeypatch.setattr(machines, "gpus_here", lambda environ: [])

    assert misfits(configured(folder), {}) == []


def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver tell of GPUs of different memory."""
    uuids, memory = ("GPU-small", "GPU-large-a", "GPU-large-b"), (4 * GB, 80 * GB, 80 * GB)
    faked(monkeypatch, FakeNvml(uuids, used_bytes=(0, 0, 0), capacity_bytes=memory, percent=(0, 0, 0)))
    monkeypatch.setattr(
        machines, "visible_gpus", lambda environ: visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2", **environ})
    )


@pytest.mark.parametrize(
    ("listed", "gpus", "gpu_bytes"),
    [
        (None, 3, 4 * GB),
        ("1,2", 2, 80 * GB),
        ("0,1", 2, 4 * GB),
        ("GPU-large-a", 1, 80 * GB),
        ("GPU-s,2", 2, 4 * GB),
        ("", 0, 0),
        ("-1", 0, 0),
    ],
)
def test_the_gpus_of_a_plan_are_those_that_the_run_may_use(
    monkeypatch: pytest.MonkeyPatch, folder: Path, listed: str | None, gpus: int, gpu_bytes: int
) -> None:
    three_gpus(monkeypatch)
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    planned = described(environ)
    given = described(environ, gpus=8, gpu_bytes=10 * GB)

    assert (planned.gpus, planned.gpu_bytes) == (gpus, gpu_bytes)
    assert (given.gpus, given.gpu_bytes) == (8, 10 * GB)
    shown = CliRunner().invoke(main, ["plan", "--set", f"model.actor={folder}"], env={"CUDA_VISIBLE_DEVICES": listed})
    cards = f"{counted(gpus, 'GPU')} of {gpu_bytes / 1e9:.1f} GB" if gpus else "no GPU"
    assert f"machine      {cards}, " in shown.output


def test_a_gpu_whose_memory_is_not_known_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    three_gpus(monkeypatch)

    # The second begins the names of two.
    for listed in ("1,MIG-1", "GPU-large", "7"):
        with pytest.raises(ConfigError, match="does not tell the memory"):
            described({"CUDA_VISIBLE_DEVICES": listed})


def test_gpus_of_which_the_driver_tells_nothing_have_no_plan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(machines, "visible_gpus", lambda environ: ["0"])
    monkeypatch.setattr(machines, "read_once", list)

    plan = ["plan", "--set", f"model.actor={folder}"]
    done, given = (
        CliRunner().invoke(main, [*plan, *more], env={"CUDA_VISIBLE_DEVICES": None})
        for more in ((), ("--gpu-memory", "80GB"))
    )

    assert done.exit_code == 78 and "does not tell the memory" in done.stderr
    assert given.exit_code == 0 and "1 GPU of 80.0 GB" in given.output


def test_a_machine_without_shared_memory_has_no_plan_and_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machines, "SHM", str(tmp_path / "shm"))

    with pytest.raises(ConfigError, match=f"^{tmp_path}/shm: No such file or directory; mount a tmpfs there"):
        described({"CUDA_VISIBLE_DEVICES": ""})


def terms_of(config: Config, machine: Machine = CARDS) -> dict[str, dict[str, int]]:
    return {budget.name: budget.terms for budget in budgets_of(config, models_of(config), machine)}


def test_each_process_on_a_card_loads_its_models_through_host_memory(folder: Path) -> None:
    config = configured(folder)
    nbytes = 2 * models_of(config).actor.parameters

    on_cards = terms_of(config)["host memory"]
    on_cpus = terms_of(config, CARDS._replace(gpus=0))["host memory"]
    sharded = terms_of(configured(folder, sharding="full"))["host memory"]

    loads = {name: value for name, value in on_cards.items() if name.endswith(": load") and value}
    assert loads == {f"{role} {index}: load": nbytes for role in ("trainer", "rollout") for index in (0, 1)}
    assert not any(name.endswith(": load") for name in on_cpus)
    assert {name for name, value in sharded.items() if name.endswith(": load") and value} == {
        "rollout 0: load", "rollout 1: load"
    }  # fmt: skip


@pytest.mark.parametrize("machine", [CARDS, CARDS._replace(gpus=0)], ids=["cards", "cpus"])
def test_the_models_of_a_clusters_workers_are_not_in_this_machines_memory(folder: Path, machine: Machine) -> None:
    cluster = {"cluster": ClusterConfig(engine="ray")}
    config = configured(folder).model_copy(update=cluster)
    with_vllm = configured(folder)
    with_vllm = with_vllm.model_copy(update={"rollout": with_vllm.rollout.model_copy(update={"engine": "vllm"})})

    found = [term for terms in terms_of(config, machine).values() for term in terms]
    of_processes = [
        terms_of(each, machine)["host memory"]["processes without their models"]
        for each in (config, with_vllm.model_copy(update=cluster))
    ]

    assert any(term.startswith("trainer 0: weights") for term in found)
    assert not any(term.startswith("rollout ") for term in found)
    assert of_processes[0] == of_processes[1], "nor are their engines"


def test_every_setting_that_is_proposed_is_toml(folder: Path) -> None:
    config = configured(folder, micro_batch_size=None, micro_batch_tokens=50, activation_checkpointing=False)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})

    lines = remedies(config, models_of(config), CARDS._replace(gpu_bytes=1))

    settings = [setting for line in lines for setting in line.rpartition(":")[0].split(" and ")]
    assert "trainer.activation_checkpointing = true" in settings and "trainer.keep_state" not in str(lines)
    for setting in settings:
        assert len(tomllib.loads(setting)) == 1, setting


@pytest.mark.parametrize(
    ("role", "other", "reward", "card_gb", "place"),
    [("worker", "trainer", 1_500_000_000, 4.5, "rollout 0"), ("trainer", "worker", None, 3, "trainer 0")],
)
def test_a_card_that_is_too_full_with_the_reference_has_it_moved_to_the_other_role(
    folder: Path, role: str, other: str, reward: int | None, card_gb: float, place: str
) -> None:
    config = configured(folder, ranks=1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"reference_device": role})})
    small = models_of(config)

    def larger(parameters: int) -> Any:
        return small.actor._replace(tensors=small.actor.tensors | {"more": (parameters,)})

    # In GB: the trainer 2, the worker 0.2 and a reward model of 3 or none, the reference 2.
    models = small._replace(
        actor=larger(10**8), reference=larger(10**9), rewards={} if reward is None else {"model": larger(reward)}
    )
    machine = CARDS._replace(gpus=2, gpu_bytes=round(card_gb * GB))

    lines = remedies(config, models, machine)

    assert [one.name for one in budgets_of(config, models, machine) if one.lacks_bytes] == [
        f"GPU of {place} (1 like it)"
    ]
    assert f'model.reference_device = "{other}": fits' in lines
    assert f'model.reference_device = "{role}"' not in str(lines)


@pytest.mark.parametrize("rollout", [{"algorithm": "ppo"}, {}], ids=["kl in the reward", "kl in the loss"])
def test_a_card_that_no_role_can_spare_the_reference_has_it_streamed(folder: Path, rollout: dict[str, Any]) -> None:
    config = configured(folder, ranks=1)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
    small = models_of(config)
    # In GB: a rank 2, a reward model 1, a reference 2, of which embeddings 0.2.
    layers = {f"model.layers.{place}.more": (int(0.9e9 / 8),) for place in range(8)}
    reference = small.actor._replace(tensors=small.actor.tensors | layers | {"more": (10**8,)})
    other = small.actor._replace(tensors=small.actor.tensors | {"more": (10**8,)})
    models = small._replace(actor=other, reference=reference, critic=None)
    machine = CARDS._replace(gpus=2, gpu_bytes=round(2.1 * GB))

    lines = remedies(config, models, machine)

    (budget,) = [one for one in budgets_of(config, models, machine) if one.lacks_bytes]
    assert budget.name == "GPU of rollout 0 (1 like it)"
    assert 'model.reference_device = "host": fits' in lines
    streamed = config.model_copy(update={"model": config.model.model_copy(update={"reference_device": "host"})})
    (host,) = [one for one in budgets_of(streamed, models, machine) if one.name == "host memory"]
    assert 1.79e9 < host.terms["rollout 0: layers of the reference"] < 1.81e9


def test_a_worker_beside_vllm_is_told_how_it_needs_no_actor(folder: Path) -> None:
    rollout = {"engine": "vllm", "max_length": 16, "cache_bytes": 1 << 20}
    config = Config.model_validate({"model": {"actor": str(folder)}, "rollout": rollout, "trainer": {"kl_coef": 0.0}})
    small = models_of(config)
    more = {"more": (10**9,)}
    # A reward model makes the worker larger than the trainer.
    models = small._replace(actor=small.actor._replace(tensors=small.actor.tensors | more),
                            rewards={"model": small.actor._replace(tensors={"most": (8 * 10**9,)})})  # fmt: skip
    worker = next(budget for budget in budgets_of(config, models, CARDS) if "rollout" in budget.name)
    machine = CARDS._replace(gpu_bytes=worker.total_bytes - 4 * models.actor.parameters)

    lines = remedies(config, models, machine)

    assert 'rollout.log_probs = "trainer": fits' in lines
    told = config.model_copy(update={"rollout": config.rollout.model_copy(update={"log_probs": "trainer"})})
    assert not any(budget.lacks_bytes for budget in budgets_of(told, models, machine))
    assert 'rollout.log_probs = "trainer"' not in str(remedies(told, models, CARDS._replace(gpu_bytes=1)))


def test_shards_of_a_vision_language_model_are_not_proposed(folder: Path, tmp_path: Path) -> None:
    small = CARDS._replace(gpu_bytes=1)
    text, vision = (configured(one, sharding="none") for one in (folder, with_images(folder, tmp_path)))

    assert "trainer.sharding" in str(remedies(text, models_of(text), small))
    assert "trainer.sharding" not in str(remedies(vision, models_of(vision), small))


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"ranks": 2, "sharding": "full"}, "m, grpo, 2 trainer ranks with shards of it"),
        ({"ranks": 4, "sharding": "hybrid"}, "m, grpo, 4 trainer ranks with shards of it"),
        ({"ranks": 2, "sharding": "none"}, "m, grpo, 2 trainer ranks with all of it each"),
        ({"ranks": 1, "sharding": "none"}, "m, grpo"),
    ],
)
def test_the_status_tells_the_choice(status: dict[str, Any], text: str) -> None:
    shown = render({"model": "m", "algorithm": "grpo", **status})

    assert f"model      {text}\n" in shown


def on_one_card(folder: Path, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"actor": str(folder), "dtype": "bfloat16"},
            "trainer": {"micro_batch_size": 1},
            "rollout": {"max_length": 16, "engine": "vllm", "cache_bytes": 50_000_000, **rollout},
            "buffer": {"max_staleness": 0},
        }
    )


ONE_CARD = CARDS._replace(gpus=1)


def test_a_card_whose_engine_sleeps_needs_the_larger_phase_in_place_of_their_sum(folder: Path) -> None:
    config = on_one_card(folder)
    asleep = on_one_card(folder, sleep=True)
    models, parts = models_of(config), ("gradients", "activations of a micro-batch", "logits")

    both = budgets_of(config, models, ONE_CARD)[0]
    awake = budgets_of(asleep, models, ONE_CARD)[0]
    terms = both.terms
    of_a_step = sum(terms[f"trainer 0: {part}"] for part in parts)
    of_the_engine = terms["rollout 0: weights of the engine"] + terms["rollout 0: KV cache"]

    assert both.name == "GPU of trainer 0 and rollout 0 (1 like it)"
    assert of_a_step < of_the_engine, "the engine's phase is the larger one"
    assert awake.name == f"{both.name}, while the engine is awake"
    assert awake.total_bytes == both.total_bytes - of_a_step
    assert awake.terms["trainer 0: moments"] == terms["trainer 0: moments"], "these stay"

    small = on_one_card(folder, sleep=True, cache_bytes=1_000)
    terms = budgets_of(on_one_card(folder, cache_bytes=1_000), models, ONE_CARD)[0].terms
    of_the_engine = terms["rollout 0: weights of the engine"] + 1_000
    stepping = budgets_of(small, models, ONE_CARD)[0]
    assert of_a_step > of_the_engine
    assert stepping.name == f"{both.name}, while the trainer steps"
    assert stepping.total_bytes == sum(terms.values()) - of_the_engine
    assert stepping.terms["rollout 0: actor"] == terms["rollout 0: actor"], "the worker's own models stay"


def test_with_cards_of_their_own_or_without_cards_sleep_saves_nothing(folder: Path) -> None:
    config, asleep = on_one_card(folder), on_one_card(folder, sleep=True)
    models = models_of(config)

    for machine in (CARDS._replace(gpus=2), CARDS._replace(gpus=0, gpu_bytes=0)):
        assert budgets_of(asleep, models, machine) == budgets_of(config, models, machine)


def test_with_adapters_an_engine_that_sleeps_has_its_weights_in_host_memory(folder: Path) -> None:
    config = on_one_card(folder, sleep=True)
    adapted = config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 4})})
    models = models_of(config)

    term = "rollout 0: weights of the engine"
    assert budgets_of(adapted, models, ONE_CARD)[-1].terms[term] > 0
    assert term not in budgets_of(config, models, ONE_CARD)[-1].terms


def test_sleep_is_named_where_it_makes_a_run_fit_and_can_be_had(folder: Path) -> None:
    config = on_one_card(folder)
    models = models_of(config)
    least = budgets_of(on_one_card(folder, sleep=True), models, ONE_CARD)[0].total_bytes
    machine = ONE_CARD._replace(gpu_bytes=least)

    assert remedies(config, models, machine).count("rollout.sleep = true: fits") == 1
    together = remedies(config, models, machine._replace(gpu_bytes=least - 1))[0]
    assert together.startswith("rollout.sleep = true and ") and together.endswith(": fits")
    for other in (
        config.model_copy(update={"buffer": config.buffer.model_copy(update={"max_staleness": 1})}),
        on_one_card(folder, engine="mine:new_engine", cache_bytes=None),
    ):
        lines = remedies(other, models, machine._replace(gpu_bytes=1_000))
        assert lines and not any("rollout.sleep" in line for line in lines)
