"""The folder of a run: name, description, `--from`; no checkpoint is lost over random lives of several runs."""

import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path

import pytest
import torch

from pipeline.buffer.sizing import checked_layout
from pipeline.config.identity import identifying_settings, identity_of, run_dir, run_name
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.runtime.latest_checkpoint import REPLACED, checkpoints_dir, read_latest, why_anew
from pipeline.runtime.lock import StateLock, user_of
from pipeline.runtime.run_folder import RunFolder, read_note, runs_of
from pipeline.runtime.run_start import begin_run, open_run
from pipeline.storage import weights_header
from pipeline.trainer.checkpoints import save_checkpoint
from tests.support.version_header import write_header

SEQUENCES = 200
USUAL = 20
LIVES = 6
KILLED = 9


def config(folder, **sections):
    daemon = {"state_dir": str(folder / "state"), "runtime_dir": str(folder / "run"), **sections.pop("daemon", {})}
    buffer = {"arena_bytes": 1 << 20, **sections.pop("buffer", {})}
    return Config.model_validate({"daemon": daemon, "buffer": buffer, **sections})


class Model:
    """The part of a model that a checkpoint needs: it writes a file of its own content."""

    def __init__(self, token):
        self.token = token

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "token").write_text(self.token)


class Tokenizer:
    def save_pretrained(self, folder):
        pass


def save(of, step, token, *, keep=0, complete=False):
    """Write a checkpoint as the trainer does."""
    most = of.trainer.max_steps
    note = CheckpointNote(
        identity_of(of), step, step, 10 * step, complete or 0 < most <= step, "0a", f"{step:016x}",
        of.model_dump(mode="json"),
    )  # fmt: skip
    return save_checkpoint(
        checkpoints_dir(of), note, actor=Model(token), tokenizer=Tokenizer(), keep=keep,
        state={"moment": torch.zeros(1)},
    )  # fmt: skip


def publish(folder, version):
    """Write the header of a weights file that holds a version."""
    write_header(folder / "weights", version)


# Names, notes, completion.


def test_the_name_tells_algorithm_model_and_identity(tmp_path):
    names = {
        actor: run_name(config(tmp_path, model={"actor": actor}, rollout={"algorithm": "ppo"}))
        for actor in ("/m/Qwen2.5-0.5B", "/s/sort-digits/model", "/c/models--Qwen--Qwen3-8B/snapshots/abc", "/a b/ü")
    }
    identity = identity_of(config(tmp_path, model={"actor": "/m/Qwen2.5-0.5B"}, rollout={"algorithm": "ppo"}))

    assert names["/m/Qwen2.5-0.5B"] == f"ppo-Qwen2.5-0.5B-{identity[:8]}"
    assert [name.rpartition("-")[0] for name in names.values()] == [
        "ppo-Qwen2.5-0.5B", "ppo-sort-digits", "ppo-Qwen3-8B", "ppo-model",
    ]  # fmt: skip


def test_the_identity_of_a_configuration_is_that_of_earlier_releases():
    """It is on disk: a new key of [model] or [prompts] must not change it at its default."""
    of = Config.model_validate({"model": {"actor": "/m"}, "prompts": {"path": "/p"}})

    assert identity_of(of) == "1645503f1785013e54d28218d182c7e8"

    for change in ({"float32_logits": True}, {"reference_device": "trainer"}, {"compile": True}):
        other = of.model_copy(update={"model": of.model.model_copy(update=change)})
        assert identity_of(other) == identity_of(of), "a run goes on with logits of another precision, or other code"


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer": {"normalize_values": True}},
        {"rollout": {"reward_scale": "running"}},
        {"trainer": {"optimizer": "muon"}},
    ],
    ids=str,
)
def test_another_state_of_training_is_another_run(changed):
    """A start takes the memory of a killed one over by its identity: other tensors there would cost its steps."""
    plain = {"trainer": {}, "rollout": {"algorithm": "ppo"}, "prompts": {"path": "/p"}, "model": {"actor": "/m"}}
    one = Config.model_validate(plain)
    other = Config.model_validate(plain | {key: {**plain[key], **values} for key, values in changed.items()})

    assert identity_of(one) != identity_of(other)
    assert [key for key, value in identifying_settings(one).items() if identifying_settings(other)[key] != value] == [
        f"{section}.{key}" for section, values in changed.items() for key in values
    ]


def test_a_run_with_the_adapters_of_earlier_releases_goes_on_and_one_with_others_is_another():
    """Adapters were on four layers by default."""
    former = {"lora_rank": 4, "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}

    def identity(**model):
        return identity_of(Config.model_validate({"model": {"actor": "/m", **model}, "prompts": {"path": "/p"}}))

    assert identity(**former) == "afd8783702eb546fe9e92bcfefdc3d8e"
    others = [identity(**former | change) for change in (
        {"lora_targets": "all-linear"}, {"lora_kind": "rslora"}, {"lora_adapter": "/a"}
    )]  # fmt: skip
    assert len({identity(**former), *others}) == 4
    assert identity(lora_targets=former["lora_targets"]) == identity()


def test_a_learning_rate_and_a_last_step_are_no_other_run_and_a_seed_is(tmp_path):
    of = config(tmp_path)

    assert run_dir(of) == run_dir(config(tmp_path, trainer={"learning_rate": 1e-6, "max_steps": 7}))
    assert run_dir(of) != run_dir(config(tmp_path, daemon={"seed": 1}))


def test_a_name_of_ones_own_is_the_folders_and_another_run_may_not_take_it(tmp_path):
    mine = config(tmp_path, daemon={"run_name": "lr-1e-6"})
    RunFolder(mine).claim()
    other = config(tmp_path, daemon={"run_name": "lr-1e-6", "seed": 1})

    with pytest.raises(
        ConfigError, match=r"run_name: the name lr-1e-6 belongs to another run \(daemon.seed is 0 there, 1"
    ):
        RunFolder(other).claim()

    assert run_dir(mine) == tmp_path / "state" / "runs" / "lr-1e-6"
    assert read_note(run_dir(mine)).identity == identity_of(mine)


def test_a_default_dtype_that_follows_the_gpus_begins_no_other_run_without_a_word(tmp_path):
    with_cards, without = (config(tmp_path, model={"actor": "/m/a", "dtype": one}) for one in ("bfloat16", "float32"))
    open_run(with_cards, tmp_path / "shm", dtype_follows_gpus=True)
    RunFolder(config(tmp_path, model={"actor": "/m/b"})).claim(dtype_follows_gpus=True)

    with pytest.raises(ConfigError) as refused:
        open_run(without, tmp_path / "shm", dtype_follows_gpus=True)

    assert str(refused.value) == (
        "model.dtype: it is float32 here by default, which follows the visible GPUs, and this start would begin a new "
        f'run beside that in bfloat16, {run_dir(with_cards)}; set model.dtype = "bfloat16" to go on with it, or '
        '"float32" for a new run'
    )
    assert not run_dir(without).exists()
    open_run(with_cards, tmp_path / "shm", dtype_follows_gpus=True)
    # A change of anything else beside it is meant.
    open_run(without.model_copy(update={"daemon": without.daemon.model_copy(update={"seed": 1})}), tmp_path / "shm",
             dtype_follows_gpus=True)  # fmt: skip


def test_a_dtype_that_is_set_begins_a_run_of_its_own_and_the_log_names_the_other(tmp_path, caplog):
    first, second = (config(tmp_path, model={"actor": "/m/a", "dtype": one}) for one in ("bfloat16", "float32"))
    RunFolder(first).claim()
    save(first, 6, "a")

    RunFolder(second).claim()
    RunFolder(second).claim(dtype_follows_gpus=True)

    assert len(runs_of(tmp_path / "state")) == 2
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"a new run begins, from step 0: name={run_dir(second).name}; run {run_dir(first).name}, of step 6, is gone on "
        'with by model.dtype = "bfloat16", not "float32"'
    ]


@pytest.mark.parametrize(
    ("one", "other", "there", "here"),
    [
        ({}, {"shuffle": False}, "prompts.shuffle = true", "false"),
        ({"system_prompt": "Be brief."}, {}, 'prompts.system_prompt = "Be brief."', "(left out)"),
    ],
)
def test_a_key_that_has_its_default_in_one_run_is_named_too(tmp_path, caplog, one, other, there, here):
    first, second = config(tmp_path, prompts=one), config(tmp_path, prompts=other)
    RunFolder(first).claim()
    save(first, 6, "a")

    RunFolder(second).claim()

    assert caplog.messages == [
        f"a new run begins, from step 0: name={run_dir(second).name}; run {run_dir(first).name}, of step 6, is gone on "
        f"with by {there}, not {here}"
    ]


def test_the_name_of_another_run_is_refused_with_a_key_that_has_its_default_in_one_of_them(tmp_path):
    RunFolder(config(tmp_path, daemon={"run_name": "mine"})).claim()

    with pytest.raises(ConfigError, match=r"belongs to another run \(prompts\.shuffle is True there, False here\)"):
        RunFolder(config(tmp_path, daemon={"run_name": "mine"}, prompts={"shuffle": False})).claim()


def test_a_new_run_names_the_one_that_is_nearest_to_it_by_the_keys_that_go_on_with_it(tmp_path, caplog):
    far, near, without = (config(tmp_path, daemon={"seed": seed}, buffer={"arena_bytes": size}) for seed, size in
                          ((4, 3 << 20), (3, 2 << 20), (3, 4 << 20)))  # fmt: skip
    for step, run in ((30, far), (20, near)):
        open_run(run, tmp_path / "shm")
        save(run, step, "a")
    open_run(without, tmp_path / "shm")
    caplog.clear()
    last = config(tmp_path, daemon={"seed": 3}, buffer={"arena_bytes": 1 << 20})

    open_run(last, tmp_path / "shm")
    open_run(last, tmp_path / "shm")
    open_run(config(tmp_path, model={"actor": "/m/b"}, daemon={"seed": 8}, buffer={"arena_bytes": 5 << 20},
                    rollout={"num_generations": 2}), tmp_path / "shm")  # fmt: skip

    assert [record.getMessage() for record in caplog.records] == [
        f"a new run begins, from step 0: name={run_dir(last).name}; run {run_dir(near).name}, of step 20, is gone on "
        f"with by buffer.arena_bytes = {2 << 20}, not {1 << 20}"
    ]


@pytest.mark.parametrize("is_added", [True, False])
def test_a_run_with_other_reward_models_is_named_by_all_of_them(tmp_path, caplog, is_added):
    """The table of a single model is `model.reward` in the identity, which no file with tables can set."""
    one, two = {"name": "model", "path": "/m/r"}, {"name": "model", "path": "/m/s", "tokenizer": "own"}
    before, now = ([one], [one, two]) if is_added else ([one, two], [one])
    first = config(tmp_path, rewards=before)
    open_run(first, tmp_path / "shm")
    save(first, 6, "a")

    open_run(config(tmp_path, rewards=now), tmp_path / "shm")

    its, not_these = (str([f"/m/{name}" for name in names]).replace("'", '"')
                      for names in ((["r"], ["r", "s (its own tokenizer)"])[:: 1 if is_added else -1]))  # fmt: skip
    assert caplog.records[-1].getMessage().endswith(f"is gone on with by the reward models = {its}, not {not_these}")


@pytest.mark.parametrize(
    ("sets", "follows"),
    [(["model.actor=m"], True), (["model.actor=m", "model.dtype=float32"], False), ([], False)],
)
def test_a_dtype_follows_the_gpus_where_nothing_sets_it_for_a_model_of_its_own(sets, follows):
    for on_cards in (True, False):
        assert load(None, sets, {}, on_cards=on_cards).dtype_follows_gpus is follows


def test_a_run_whose_steps_are_taken_says_so_and_where_its_model_is(tmp_path):
    of = config(tmp_path, trainer={"max_steps": 4})
    RunFolder(of).claim()
    assert RunFolder(of).completion() == ""
    model = save(of, 6, "a")

    said = RunFolder(of).completion()

    assert "is complete: step 6 of trainer.max_steps = 4; raise trainer.max_steps to go on" in said
    assert said.endswith(str(model))
    for further in ({"max_steps": 7}, {"max_steps": 0}, {"max_steps": 4, "resume": "never"}):
        assert RunFolder(config(tmp_path, trainer=further)).completion() == ""


def test_a_run_that_ended_with_its_passes_says_so_and_goes_on_with_more_of_them(tmp_path):
    def of(**keys):
        return config(tmp_path, trainer=keys)

    RunFolder(of(max_epochs=2)).claim()
    save(of(max_epochs=2), 5, "a")
    assert RunFolder(of(max_epochs=2)).completion() == "", "a stop before its end"

    save(of(max_epochs=2), 6, "a", complete=True)

    assert (
        "is complete: step 6 is the last of trainer.max_epochs = 2; raise trainer.max_epochs to go on"
        in RunFolder(of(max_epochs=2)).completion()
    )
    assert "trainer.max_epochs = 1" in RunFolder(of(max_epochs=1)).completion()
    for further in ({"max_epochs": 3}, {"max_epochs": 0}, {"max_steps": 9}):
        assert RunFolder(of(**further)).completion() == ""
    save(of(max_epochs=2, max_steps=7), 7, "a")
    assert RunFolder(of(max_epochs=2, max_steps=9)).completion() == "", "max_steps had ended it"


def test_fresh_names_the_run_that_it_removes_and_removes_no_other(tmp_path, caplog):
    mine, other = config(tmp_path), config(tmp_path, daemon={"seed": 1})
    for of in (mine, other):
        RunFolder(of).claim()
        save(of, 3, "a")

    RunFolder(config(tmp_path, trainer={"resume": "never"})).begin()

    assert [path.name for path in run_dir(mine).iterdir()] == ["run.json"]
    assert read_latest(checkpoints_dir(other)).step == 3
    assert f"removed, because a fresh start was asked for: run={run_name(mine)} checkpoints=1 step=3" in caplog.text


@pytest.mark.parametrize("killed", [False, True])
def test_fresh_keeps_what_was_moved_aside_also_if_it_is_killed(tmp_path, monkeypatch, killed):
    of = config(tmp_path)
    RunFolder(of).claim()
    for step in (3, 4):
        save(of, step, "a")
    RunFolder(of).go_back(checkpoints_dir(of) / "step-000003")
    aside = run_dir(of) / "aside" / "1-from-step-000003" / "checkpoints" / "step-000004"
    files = sorted(path.name for path in aside.iterdir())
    fresh = RunFolder(config(tmp_path, trainer={"resume": "never"}))

    if killed:
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.runtime.run_folder._discard", interrupted_after_the_rename)
            with pytest.raises(KeyboardInterrupt):
                fresh.begin()
        assert not aside.exists()
        RunFolder(config(tmp_path, daemon={"seed": 1})).claim()
    else:
        fresh.begin()

    assert sorted(path.name for path in aside.iterdir()) == files != []
    assert not list(run_dir(of).parent.glob(".removed-*"))
    assert not (checkpoints_dir(of) / "step-000003").exists()


def interrupted_after_the_rename(removed):
    if removed.exists():
        raise KeyboardInterrupt


def test_a_checkpoint_whose_record_a_kill_left_out_is_found(tmp_path):
    of = config(tmp_path)
    RunFolder(of).claim()
    save(of, 3, "a")
    (checkpoints_dir(of) / "latest.json").unlink()

    RunFolder(of).find_latest()

    assert read_latest(checkpoints_dir(of)).path == "step-000003"


def test_a_checkpoint_that_was_being_replaced_when_its_trainer_died_is_put_back(tmp_path):
    of = config(tmp_path)
    RunFolder(of).claim()
    model = save(of, 3, "a")
    model.rename(model.with_name(f".{model.name}{REPLACED}1"))

    open_run(of, tmp_path / "shm")

    assert (model / "token").read_text() == "a"
    assert sorted(path.name for path in checkpoints_dir(of).iterdir()) == ["latest.json", "step-000003"]


def test_the_runs_of_a_state_directory_are_listed_by_their_last_start(tmp_path):
    first, second = config(tmp_path), config(tmp_path, daemon={"seed": 1})
    for of in (first, second, first):
        RunFolder(of).claim()
        RunFolder(of).begin()
    model = save(first, 2, "a")

    listed = runs_of(tmp_path / "state")

    assert [(run.folder, run.checkpoint) for run in listed] == [(run_dir(second), None), (run_dir(first), model)]


# Going back.


def test_going_back_keeps_the_later_checkpoints_and_the_rows_aside(tmp_path):
    of = config(tmp_path)
    RunFolder(of).claim()
    for step in (2, 4, 6):
        save(of, step, f"at {step}")
    spool = run_dir(of) / "spool" / f"{identity_of(of)}.safetensors"
    spool.parent.mkdir()
    spool.write_bytes(b"rows")

    assert open_run(of, tmp_path / "shm", back_to="step-2") == ""

    aside = run_dir(of) / "aside" / "1-from-step-000002"
    assert read_latest(checkpoints_dir(of)).step == 2
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert (aside / "spool" / spool.name).read_bytes() == b"rows" and not spool.exists()
    save(of, 4, "anew")
    open_run(of, tmp_path / "shm", back_to="2")
    assert (run_dir(of) / "aside/2-from-step-000002/checkpoints/step-000004/token").read_text() == "anew"
    assert (aside / "checkpoints/step-000004/token").read_text() == "at 4"


@pytest.mark.parametrize(
    ("back_to", "trainer", "message"),
    [
        ("step-000003", {}, "no such checkpoint of run grpo-sort-digits-.*; it has: step-000002, step-000004"),
        ("latest", {}, "no such checkpoint"),
        ("2", {"max_steps": 2}, "has all of trainer.max_steps = 2; raise it"),
        ("2", {"kind": "external"}, "an external trainer keeps its own checkpoints"),
    ],
)
def test_going_back_where_it_cannot_is_refused_and_changes_nothing(tmp_path, back_to, trainer, message):
    model = {"actor": str(tmp_path / "sort-digits" / "model")}
    of = config(tmp_path, trainer=trainer, model=model)
    RunFolder(of).claim()
    for step in (2, 4):
        save(of, step, "a")
    before = sorted(run_dir(of).rglob("*"))

    with pytest.raises(ConfigError, match=f"--from {back_to}: .*{message}"):
        open_run(of, tmp_path / "shm", back_to=back_to)

    assert sorted(run_dir(of).rglob("*")) == before


def test_going_back_gives_up_the_shared_memory_of_a_killed_supervisor(tmp_path):
    of, shm = config(tmp_path), tmp_path / "shm"
    open_run(of, shm)
    begin_run(of, shm, checked_layout(of))
    save(of, 2, "a")
    publish(shm, 3)

    open_run(of, shm, back_to="2")

    assert not shm.exists()


# Shared memory and locks.


def test_steps_of_another_killed_run_in_shared_memory_are_not_removed(tmp_path):
    mine, other, shm = config(tmp_path), config(tmp_path, daemon={"seed": 1}), tmp_path / "shm"
    open_run(other, shm)
    begin_run(other, shm, checked_layout(other))
    save(other, 2, "a")
    publish(shm, 3)
    open_run(mine, shm)

    with pytest.raises(
        ConfigError,
        match=rf"holds the run {run_name(other)}, killed at policy version 3; .* version 2: "
        r"start it once more as it was configured \(daemon\.seed = 1, not 0\), to save it",
    ):
        begin_run(mine, shm, checked_layout(mine))
    of_two_ranks = config(tmp_path, daemon={"seed": 1}, trainer={"world_size": 2, "resume": "never"})
    with pytest.raises(ConfigError, match=r"as it was configured \(trainer\.world_size = 1, not 2\), to save it"):
        begin_run(of_two_ranks, shm, checked_layout(of_two_ranks))

    assert weights_header.newest_version(shm / "weights").version == 3
    save(other, 3, "b")
    assert not begin_run(mine, shm, checked_layout(mine)).taken_over, "all of its steps are in a checkpoint"


@pytest.mark.parametrize(
    ("is_cut", "reason"),
    [
        (False, "it has the layout of another release"),
        (True, "shared memory was truncated by another program: .*/arena holds 8,192 B of [0-9,]* B"),
    ],
)
def test_steps_beside_an_arena_that_cannot_be_read_are_not_removed_and_the_reason_is_told(
    tmp_path, monkeypatch, is_cut, reason
):
    of, shm = config(tmp_path), tmp_path / "shm"
    open_run(of, shm)
    begin_run(of, shm, checked_layout(of))
    save(of, 2, "a")
    publish(shm, 3)
    # A key that is gone, and records of another layout.
    written = json.loads((shm / "config.json").read_text())
    written["buffer"]["checksum"] = True
    (shm / "config.json").write_text(json.dumps(written))
    if is_cut:
        os.truncate(shm / "arena", 8192)
    else:
        monkeypatch.setattr("pipeline.storage.layout.LAYOUT_VERSION", 10**6)
    open_run(of, shm)

    way = "start it once more with the release of rlhfd that ran it, if that was another one, to save it, or give"
    with pytest.raises(
        ConfigError, match=rf"version 3; .* version 2, and its arena cannot be read \({reason}\): {way}"
    ):
        begin_run(of, shm, checked_layout(of))

    assert weights_header.newest_version(shm / "weights").version == 3


def test_a_killed_run_with_steps_in_shared_memory_is_taken_over_though_its_steps_are_taken(tmp_path):
    of, shm = config(tmp_path, trainer={"max_steps": 2}), tmp_path / "shm"
    open_run(of, shm)
    begin_run(of, shm, checked_layout(of))
    save(of, 2, "a")

    assert open_run(of, shm) == ""
    shutil.rmtree(shm)
    assert "is complete" in open_run(of, shm)


def test_a_second_instance_of_a_state_directory_is_refused_and_told_who_holds_it(tmp_path):
    state = tmp_path / "state"

    with StateLock(state, tmp_path / "run", "mine"):
        user = user_of(state)
        with pytest.raises(ConfigError) as refused, StateLock(state, tmp_path / "other", "its"):
            pass

    assert user == (os.getpid(), str(tmp_path / "run"), "mine")
    assert str(refused.value) == (
        f"daemon.state_dir: {state} is in use by pid {os.getpid()}, daemon.runtime_dir {tmp_path / 'run'}"
    )
    assert user_of(state) is None
    with StateLock(state, tmp_path / "other", "its"):
        pass


# Random lives.


class Lives:
    """Random lives of several runs in one state directory; each life is a process that may be killed at any file."""

    def __init__(self, folder, seed):
        self.folder = folder
        self.shm = folder / "shm"
        self.random = random.Random(seed)
        self.tokens = 0
        # By run: step -> token of each checkpoint that must be there.
        self.sure = {}
        self.kills = self.refusals = self.completions = self.resumes = 0

    def a_config(self, **trainer):
        changes = self.random.choice([{}, {"daemon": {"seed": 1}}, {"rollout": {"algorithm": "ppo"}}])
        most = self.random.choice([0, 0, 3, 6, 12])
        return config(self.folder, trainer={"max_steps": most, **trainer}, **changes)

    def new_token(self):
        self.tokens += 1
        return f"token {self.tokens}"

    def live(self):
        """Start a run, train, save, and stop or be killed; then check every checkpoint of every run."""
        fresh = self.random.random() < 0.1
        of = self.a_config(resume="never" if fresh else "auto")
        mine = self.sure.setdefault(run_name(of), {})
        known = [step for step in self.steps_in(of) if step in mine]
        back_to = str(self.random.choice(known)) if known and not fresh and self.random.random() < 0.2 else ""
        steps, every = self.random.randint(0, 5), self.random.choice([0, 1, 2])
        dies_at = self.random.choice([None, self.random.randint(1, 60), self.random.randint(1, 12)])
        tokens = [self.new_token() for _ in range(steps + 1)]
        told = self.in_a_process(lambda tell: self.life(of, back_to, steps, every, tokens, tell), dies_at)
        self.follow(of, fresh, back_to, told, told[-1][0] == "killed")
        if self.random.random() < 0.3:
            # The machine crashes.
            shutil.rmtree(self.shm, ignore_errors=True)

    def life(self, of, back_to, steps, every, tokens, tell):
        """One daemon: the real decisions about folders and the real checkpoints, without the computation."""
        with StateLock(self.folder / "state", self.folder / "run", run_name(of)):
            try:
                if open_run(of, self.shm, back_to=back_to):
                    return tell("complete")
                workspace = begin_run(of, self.shm, checked_layout(of))
            except ConfigError as error:
                return tell("refused", str(error))
            latest = read_latest(checkpoints_dir(of))
            newest = weights_header.newest_version(workspace.weights_path)
            if latest is None or why_anew(of, latest):
                latest = None
            step = newest.version if newest is not None else 0 if latest is None else latest.step
            tell("resumed", step, newest is not None, back_to)
            saved, most = 0 if latest is None else latest.step, of.trainer.max_steps
            for token in tokens[1:]:
                if 0 < most <= step:
                    break
                step += 1
                publish(workspace.folder, step)
                if every and step % every == 0:
                    saved = self.saving(of, step, token, tell)
            if step > saved:
                self.saving(of, step, tokens[0], tell)
            workspace.remove()
            tell("stopped")

    def saving(self, of, step, token, tell):
        tell("saving", step, token)
        save(of, step, token)
        tell("saved", step, token)
        return step

    def in_a_process(self, work, dies_at):
        """Return what a process told; `dies_at` is the change of a name on disk before which it is killed."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                left = [dies_at or 1 << 30]
                for name in ("rename", "unlink", "mkdir", "rmdir"):
                    setattr(os, name, dying(getattr(os, name), left))
                os.fsync = lambda descriptor: None
                work(lambda *words: os.write(writer, json.dumps(words).encode() + b"\n"))
            except BaseException:  # noqa: BLE001 - a process of the test ends here in any case
                traceback.print_exc(file=sys.stderr)
                os._exit(1)
            os._exit(0)
        os.close(writer)
        with open(reader) as lines:
            told = [json.loads(line) for line in lines]
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, KILLED), "a life ended with an error"
        self.kills += code == KILLED
        return [*told, ["killed" if code else "over"]]

    def follow(self, of, fresh, back_to, told, killed):
        """Bring the expectation to what the process told, and compare it with the disk."""
        mine = self.sure[run_name(of)]
        before, maybe = dict(mine), {}
        words = [line[0] for line in told]
        is_removed = fresh and ("resumed" in words or killed)
        if is_removed:
            mine.clear()
        for line in told:
            if line[0] == "resumed":
                self.resumes += 1
                _, step, from_memory, _ = line
                if fresh:
                    assert step == 0 and not from_memory, told
                elif back_to:
                    assert step == int(back_to), told
                    for later in [other for other in mine if isinstance(other, int) and other > step]:
                        # Aside from here on: no checkpoint of that step takes its place.
                        token = mine.pop(later)
                        mine[token] = token
                elif before and not from_memory:
                    assert step in before, (told, before)
                if not from_memory and not fresh and before:
                    assert step > 0, "a run with a checkpoint never begins anew"
            elif line[0] == "saving":
                # The former checkpoint of the same run and step goes once the new one is whole.
                maybe[line[1]] = mine.pop(line[1], None), line[2]
            elif line[0] == "saved":
                mine[line[1]] = line[2]
                maybe.pop(line[1], None)
        self.refusals += "refused" in words
        self.completions += "complete" in words
        found = self.on_disk()
        for name, checkpoints in self.sure.items():
            missing = set(checkpoints.values()) - found.get(name, set())
            assert not missing, f"lost of {name}: {missing}; {told}"
        for step, (former, new) in maybe.items():
            # Killed while it was written: one of them is there, the former one perhaps moved away for the moment.
            present = found.get(run_name(of), set()) & {former, new}
            assert present or former is None, f"lost of {run_name(of)}: {former}; {told}"
            if present:
                mine[step] = new if new in present else former
        if "stopped" in words:
            assert not list(checkpoints_dir(of).glob(".step-*")), told

    def on_disk(self):
        """Return the tokens of all whole checkpoints by run."""
        found = {}
        for note in (self.folder / "state").rglob("trainer_state.json"):
            step, _, moved = note.parent.name.removeprefix(".").partition(REPLACED)
            is_whole = note.parent.name.startswith("step-")
            if any(part.startswith(".removed-") for part in note.parts):
                continue
            if not (is_whole or (moved and not note.parent.with_name(step).exists())):
                continue
            of = Config.model_validate_json(json.dumps(json.loads(note.read_text())["config"]))
            found.setdefault(run_name(of), set()).add((note.parent / "token").read_text())
        return found

    def steps_in(self, of):
        return [int(path.name[5:]) for path in checkpoints_dir(of).glob("step-*")]


def dying(change, left):
    """Return a function that kills its process at the n-th change, as SIGKILL does: nothing is undone."""

    def changing(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os._exit(KILLED)
        return change(*args, **options)

    return changing


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [
    pytest.param(range(USUAL), id="usual"),
    pytest.param(range(USUAL, SEQUENCES), marks=pytest.mark.variant, id="others"),
])  # fmt: skip
def test_no_checkpoint_is_lost_over_random_starts_stops_kills_changes_and_fresh_starts(tmp_path, seeds):
    kills = refusals = completions = resumes = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        lives = Lives(folder, seed)
        for _ in range(LIVES):
            lives.live()
        shutil.rmtree(folder)
        kills, refusals = kills + lives.kills, refusals + lives.refusals
        completions, resumes = completions + lives.completions, resumes + lives.resumes

    # Each kind of life came often enough to mean something.
    assert min(kills, resumes) > 1.5 * len(seeds), (kills, resumes)
    assert min(refusals, completions) > len(seeds) / 20, (refusals, completions)
