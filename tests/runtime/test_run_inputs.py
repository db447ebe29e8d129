"""A resume knows whether the files that it reads are those that its run began with."""

import logging
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import run_inputs
from pipeline.runtime.run_start import open_run
from tests.runtime.test_run_folder import save

REWARD = "def score(*_, **__):\n    return {}\n"


def a_model(folder, seed=0, tensors=3):
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    made = {f"layers.{n}.weight": torch.randn(64, 300, generator=generator) for n in range(tensors)}
    save_file(made | {"norm.weight": torch.ones(300)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ a }}")
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A run with a model of its own, a critic, a reference, a reward model, prompts and a reward function."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("actor", "critic", "reference", "reward")):
        a_model(tmp_path / name, seed)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "b"}\n')
    (tmp_path / "own_rewards.py").write_text(REWARD.format(1.0))
    return tmp_path


def config(site, **model):
    models = {name: str(site / name) for name in ("actor", "critic", "reference", "reward")}
    return Config.model_validate({
        "daemon": {"state_dir": str(site / "state"), "runtime_dir": str(site / "run")},
        "model": {**models, **model},
        "prompts": {"path": str(site / "prompts.jsonl")},
        "evaluation": {"files": [str(site / "held_out.jsonl")]},
        "rollout": {"algorithm": "ppo"},
        "rewards": ["own_rewards:score", "length"],
        "buffer": {"arena_bytes": 1 << 20},
    })  # fmt: skip


@pytest.fixture(autouse=True)
def each_start_reads_anew(monkeypatch):
    """In the product each start is another process."""
    monkeypatch.setattr(run_inputs, "_known", {})


def start(of, site):
    run_inputs._known.clear()
    open_run(of, site / "shm")
    run_inputs.note(of)


def started(site, **model):
    """A run that was started and has a checkpoint."""
    of = config(site, **model)
    start(of, site)
    save(of, 5, "a")
    return of


def test_a_run_whose_files_are_the_same_goes_on_without_a_word(site, caplog):
    of = started(site)
    os.utime(site / "actor" / "model.safetensors", (1, 1))

    start(of, site)

    assert not caplog.records, "a time of change alone is none"


@pytest.mark.parametrize("name", ["actor", "critic", "reference", "reward"])
def test_other_weights_under_the_same_path_are_refused_with_fresh_named(site, name):
    of = started(site)
    before = (site / name / "model.safetensors").stat()
    a_model(site / name, seed=9)
    os.utime(site / name / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ConfigError, match=rf"^model\.{name}: the weights of model\.{name} are not those .*--fresh"):
        start(of, site)
    with pytest.raises(ConfigError):
        start(of, site)


def of_models(site, *labels):
    """A run with the reward models `reward`, of its own tokenizer, and `second`, in tables of these labels."""
    tables = [{"name": "model", "path": str(site / "reward"), "tokenizer": "own"},
              {"name": "model", "path": str(site / "second")}]  # fmt: skip
    tables = [table | ({"label": label} if label else {}) for table, label in zip(tables, labels, strict=False)]
    return config(site, reward=None).model_copy(
        update={"rewards": Config.model_validate({"rewards": tables}).rewards, "daemon": config(site).daemon}
    )


def test_other_weights_of_any_of_several_reward_models_are_refused_whatever_their_order_and_labels(site):
    a_model(site / "second", 7)
    of = of_models(site, "kind", "")
    start(of, site)
    save(of, 5, "a")
    other = of_models(site, "", "style")
    other = other.model_copy(update={"rewards": other.rewards[::-1]})
    start(other, site)
    a_model(site / "second", seed=9)

    with pytest.raises(ConfigError, match=r"^rewards\.style\.path: the weights of rewards\.style\.path are not those"):
        start(other, site)
    with pytest.raises(ConfigError, match=r"^rewards\.model\.path: the weights of rewards\.model\.path are not those"):
        start(of, site)


def test_one_reward_model_in_a_table_is_compared_with_that_of_model_reward(site, caplog):
    of = started(site, reward_tokenizer="own")
    table = of_models(site, "kind")
    table = table.model_copy(update={"rewards": [*of.rewards, *table.rewards]})
    start(table, site)
    assert not caplog.records, "the same run, the same files"

    (site / "reward" / "tokenizer.json").write_text('{"model": 2}')
    start(table, site)
    assert "changed since the run's last start: reward tokenizer" in caplog.text

    a_model(site / "reward", seed=9)
    with pytest.raises(ConfigError, match=r"^rewards\.kind\.path: the weights of rewards\.kind\.path are not those"):
        start(table, site)


def test_adapters_are_not_put_on_another_base(site):
    of = started(site, lora_rank=4)
    a_model(site / "actor", seed=9)

    with pytest.raises(ConfigError, match="whose adapters fit their own base alone"):
        start(of, site)


def test_another_tokenizer_is_refused_and_another_chat_template_is_said(site, caplog):
    of = started(site)
    (site / "actor" / "chat_template.jinja").write_text("{{ other }}")
    start(of, site)
    assert "changed since the run's last start: chat template" in caplog.text

    caplog.clear()
    (site / "reward" / "tokenizer.json").write_text('{"model": 2}')
    start(of, site)
    assert not caplog.records, "it gets the token ids of the actor"

    (site / "actor" / "tokenizer.json").write_text('{"model": 2}')
    with pytest.raises(ConfigError, match=r"^model\.actor: the tokenizer are not those"):
        start(of, site)


@pytest.mark.parametrize(("file", "said"), [
    ("prompts.jsonl", "prompts "),
    ("held_out.jsonl", "evaluation.files "),
    ("own_rewards.py", "code of own_rewards:score"),
    ("reward/tokenizer.json", "reward tokenizer"),
    ("reward/chat_template.jinja", "reward tokenizer"),
    ("actor/additional_chat_templates/tools.jinja", "chat template"),
])  # fmt: skip
def test_other_prompts_rewards_and_templates_are_said_once(site, caplog, file, said):
    of = started(site, reward_tokenizer="own")
    (site / file).write_text((site / file).read_text().replace("a", "c").replace("b", "c").replace("1", "2"))

    start(of, site)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said in warning and "--fresh" in warning

    caplog.clear()
    start(of, site)
    assert not caplog.records


@pytest.mark.parametrize(
    ("file", "changed"),
    [("prompts.jsonl", "prompts {site}/prompts.jsonl"), ("actor/tokenizer.json", "tokenizer"), ("own_rewards.py", "")],
)
def test_what_trainer_and_worker_read_alike_is_named_once_it_is_not_as_at_the_last_start(site, file, changed):
    of = started(site)
    (site / file).write_text((site / file).read_text() + "\n")

    assert run_inputs.changed_since_start(of) == [changed.format(site=site)] * bool(changed)
    (run_dir(of) / run_inputs.FILE_NAME).unlink()
    assert run_inputs.changed_since_start(of) == [], "nothing tells"


def test_of_a_folder_of_prompts_the_files_of_its_split_count(site, caplog):
    folder = site / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "test.jsonl").write_text('{"prompt": "b"}\n')
    (folder / "1.png").write_bytes(b"1")
    of = config(site)
    of = of.model_copy(update={"prompts": of.prompts.model_copy(update={"path": str(folder)})})
    start(of, site)
    save(of, 5, "a")
    (folder / "test.jsonl").write_text('{"prompt": "c"}\n')
    (folder / "1.png").write_bytes(b"2")
    start(of, site)
    assert not caplog.records, "another split, and a file without rows"
    (folder / "train.jsonl").write_text('{"prompt": "c"}\n')

    start(of, site)

    assert caplog.messages == [
        f"changed since the run's last start: prompts {folder} (`rlhfd start --fresh` starts anew)"
    ]


def test_other_prompts_of_a_data_set_by_name_are_said(site, caplog, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(site / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(site / "datasets"))
    folder = site / "hub" / "datasets--a--b"
    rows = folder / "snapshots" / "rev1" / "train.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"prompt": "a"}\n')
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("rev1")
    of = config(site)
    of = of.model_copy(update={"prompts": of.prompts.model_copy(update={"path": "datasets:a/b"})})
    start(of, site)
    save(of, 5, "a")
    rows.write_text('{"prompt": "c"}\n')

    start(of, site)

    assert caplog.messages == [
        "changed since the run's last start: prompts datasets:a/b (`rlhfd start --fresh` starts anew)"
    ]


def test_a_run_without_anything_to_go_on_from_takes_the_files_as_they_are(site, caplog):
    of = config(site)
    start(of, site)
    a_model(site / "actor", seed=9)

    start(of, site)
    save(of, 5, "a")
    start(of, site)

    assert not caplog.records


def test_weights_that_were_only_written_anew_are_taken_once_their_note_is_removed(site):
    of = started(site)
    a_model(site / "actor", seed=9)
    (run_dir(of) / run_inputs.FILE_NAME).unlink()

    start(of, site)
    start(of, site)


def test_a_damaged_note_of_the_files_is_said(site, caplog):
    of = started(site)
    (run_dir(of) / run_inputs.FILE_NAME).write_bytes(b"{")

    start(of, site)

    assert "nothing tells whether the run's files are still those" in caplog.text


def test_of_large_weights_any_tensor_that_training_changed_is_found_and_little_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_inputs, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(run_inputs, "_SMALL_BYTES", 2000)
    monkeypatch.setattr(run_inputs, "_PIECE_BYTES", 64)
    folder = a_model(tmp_path / "model", tensors=40)
    before, size = run_inputs.digest_of_model(folder), (folder / "model.safetensors").stat().st_size
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))

    for number in range(40):
        run_inputs._known.clear()
        a_model(folder, tensors=40)

        tensors = load_file(folder / "model.safetensors")
        # At the begin, in the middle, or at the end.
        elements = tensors[f"layers.{number}.weight"].view(-1)
        elements[[slice(8), slice(len(elements) // 2 - 4, len(elements) // 2 + 4), slice(-8, None)][number % 3]] += 1e-6
        save_file(tensors, folder / "model.safetensors")
        read.clear()
        assert run_inputs.digest_of_model(folder) != before, number
        assert sum(read) < size / 100
    a_model(folder, tensors=40)
    run_inputs._known.clear()
    assert run_inputs.digest_of_model(folder) == before


def test_of_large_weights_in_another_format_even_parts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_inputs, "_WHOLE_BYTES", 0)
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(bytes(range(256)) * 4096)
    before = run_inputs.digest_of_model(tmp_path)

    run_inputs._known.clear()
    weights.write_bytes(bytes(reversed(range(256))) * 4096)

    assert run_inputs.digest_of_model(tmp_path) != before


@pytest.mark.parametrize(("on", "is_compared"), [("worker", True), ("trainer", False)])
def test_machines_of_workers_are_compared_by_the_files_that_these_read(site, monkeypatch, on, is_compared):
    (site / "own_losses.py").write_text("def loss(*_): ...\n")
    given = config(site).model_dump(mode="json")
    given["rollout"]["kl_coef"], given["trainer"]["kl_coef"] = (0.1, None) if on == "worker" else (0.0, 0.1)
    given["model"]["reference_device"] = "worker" if on == "worker" else "trainer"
    given["trainer"]["policy_loss"] = "own_losses:loss"
    of = Config.model_validate(given)
    assert of.reference_on == on
    whole = run_inputs.inputs_of(of)
    prompts = f"prompts {site / 'prompts.jsonl'}"

    compared = run_inputs.inputs_to_compare(of)
    monkeypatch.setattr(run_inputs, "_WHOLE_BYTES", 10)
    without_large = run_inputs.inputs_to_compare(of)

    left_out = {"code of own_losses:loss"} | (set() if is_compared else {"model.reference"})
    assert compared == {name: digest for name, digest in whole.items() if name not in left_out}
    assert prompts in compared and prompts not in without_large
