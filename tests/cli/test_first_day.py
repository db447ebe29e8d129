"""Mistakes of a new user, found by trying: each was answered by silence, a traceback or a wrong cause.

| mistake | answer before | answer now |
|---|---|---|
| ``start grpo.toml`` | unexpected extra argument | names ``--config`` |
| ``start --max-steps 3`` | no such option | names ``--set trainer.max_steps=VALUE`` |
| ``strat`` | no such command | names ``start`` |
| prompts as one JSON array, or an object over several lines | up to 20 lines of "not JSON" | one line with jq |
| prompts as Parquet or gzip | "not UTF-8" | the format's name |
| ``reward_functions = ["my_rewards.py:exact"]`` | a worker fails | "did you mean my_rewards:exact?" |
| an adapter's folder as ``model.actor`` | "no config.json" | says that it is an adapter |
| PPO's keys with GRPO, LoRA's without a rank, ... | silence | a note for each key without effect |
| ``trainer.max_steps = 1000`` | silence: after 150 steps a tenth of the learning rate | a note |
| ``rollout.max_length`` beyond the model's positions | silence | a note |
| texts as prompts of a chat model | silence: the template is not applied | a note |
| a tokenizer without an end token | TypeError in each rollout | `tests/rollout/test_lengths.py` |
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.errors import ExitCode
from pipeline.supervisor.notes import notes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("RLHFD_CONFIG", "RLHFD_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def rlhfd(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def check(text: str) -> Result:
    Path("c.toml").write_text(text)
    return rlhfd("config", "check", "--config", "c.toml")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("start", "grpo.toml"), "A configuration file is given by --config grpo.toml"),
        (("start", "trainer.max_steps=3"), "A value is given by --set trainer.max_steps=3"),
        (("start", "--max-steps", "3"), "Keys are set by --set trainer.max_steps=VALUE"),
        (("start", "--kl-coef=0.1"), "Keys are set by --set rollout.kl_coef=VALUE or --set trainer.kl_coef=VALUE"),
        (("strat",), "Did you mean start?"),
        (("logs", "nosuch"), "no role nosuch, the roles are supervisor, buffer, rollout, trainer, setup, forkserver"),
        (("logs", "rolout"), "no role rolout, did you mean rollout?"),
    ],
)
def test_a_refused_command_line_names_the_one_that_was_meant(arguments: tuple[str, ...], advice: str) -> None:
    result = rlhfd(*arguments)

    assert result.exit_code == ExitCode.USAGE
    assert advice in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n', "the file is one JSON array, not JSON lines: jq -c '.[]' p"),
        (b'[{"prompt": "a"}, {"prompt": "b"}]', "the file is one JSON array, not JSON lines: jq -c '.[]' p"),
        (b'{\n  "prompt": "a"\n}\n', "an object over several lines, not JSON lines: jq -c . p"),
        (b"PAR1\x15\x04\x15", 'the file is Parquet, not JSON lines: one object like {"prompt": "..."} a line'),
        (b"\x1f\x8b\x08\x00", "the file is compressed by gzip, not JSON lines"),
    ],
)
def test_prompts_of_another_format_are_one_line(content: bytes, message: str) -> None:
    Path("p").write_bytes(content)

    result = check('[prompts]\npath = "p"\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{Path('p').absolute()}:1:1: {message}")


REWARDS = "def exact(ids, mask, **_): return 1.0\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards.py:exact", "cannot import my_rewards.py: my_rewards is a module, no package, did you mean "
                                "my_rewards:exact?"),
        ("my_reward:exact", "cannot import my_reward: there is no module my_reward; looked in {folder}"),
        ("my_rewards:exakt", "my_rewards has no function exakt"),
        ("broken:exact", "cannot import broken: ValueError: no luck"),
    ],
)  # fmt: skip
def test_reward_modules_that_do_not_import_are_found_by_the_check(folder: Path, name: str, message: str) -> None:
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("raise ValueError('no luck')\n")

    result = check(f'[rollout]\nreward_functions = ["{name}"]\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"c.toml:2:20: rollout.reward_functions: {message.replace('{folder}', str(folder))}")


def test_reward_modules_are_looked_up_in_the_configurations_folder(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there/rewards_there.py").write_text(REWARDS)
    (folder / "there/c.toml").write_text('[rollout]\nreward_functions = ["rewards_there:exact"]\n')

    result = rlhfd("config", "check", "--config", "there/c.toml")

    assert (result.exit_code, result.stdout) == (0, "there/c.toml: ok\n"), result.stderr


def test_an_adapter_is_not_taken_for_a_model(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")

    result = check('[model]\nactor = "adapter"\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    assert "adapter is a LoRA adapter: merge it into its model first" in result.stderr


def model(folder: Path, **config: int) -> Path:
    (folder / "m").mkdir()
    (folder / "m/config.json").write_text(json.dumps(config))
    (folder / "m/chat_template.jinja").write_text("{{ messages }}")
    (folder / "p").write_text('{"prompt": "7 + 8", "answer": 15}\n')
    return folder / "m"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("[rollout]\nlam = 0.9\n", 'c.toml:2:7: rollout.lam: has no effect with rollout.algorithm = "grpo"'),
        ("[model]\nlora_alpha = 8.0\n", "c.toml:2:14: model.lora_alpha: has no effect with model.lora_rank = 0"),
        (
            '[trainer]\nkind = "external"\nlearning_rate = 1e-6\n',
            'c.toml:3:17: trainer.learning_rate: has no effect with trainer.kind = "external"',
        ),
        (
            "[trainer]\nmax_steps = 1000\n",
            "c.toml:2:13: trainer.max_steps: 1000 steps, of which those after 150 have 0.1 of the learning rate: set "
            "trainer.decay_steps, for example to 1000, or to 0 for no decay",
        ),
        (
            "[trainer]\nmax_steps = 20\nwarmup_steps = 30\n",
            "c.toml:3:16: trainer.warmup_steps: 30 steps of 20 (trainer.max_steps): the learning rate rises until the "
            "end and is never in force",
        ),
        (
            "[buffer]\nsample_batch_size = 100\n",
            "c.toml:2:21: buffer.sample_batch_size: 100 rows are no multiple of the 8 responses to a prompt "
            "(rollout.num_generations): groups are divided between batches; multiples are 96 and 104",
        ),
        (
            '[model]\nactor = "m"\n[rollout]\nmax_length = 1024\n',
            "c.toml:2:9: model.actor: the model was made for 512 tokens (max_position_embeddings), rows have up to "
            "1,024 (rollout.max_length)",
        ),
        (
            '[prompts]\npath = "p"\n',
            '{folder}/p:1:1: answer is the number 15, not a text: gt_answer of reward functions is then int 15, '
            'unequal to the text of any response; for a text write "15"',
        ),
        (
            '[model]\nactor = "m"\n[prompts]\npath = "p"\n',
            "prompts.template: the prompts are texts, and the model's chat template is not applied to them: \"chat\" "
            'applies it, "none" states that none is wanted',
        ),
    ],
)  # fmt: skip
def test_what_can_run_and_is_hardly_meant_is_noted(folder: Path, text: str, note: str) -> None:
    model(folder, max_position_embeddings=512)

    result = check(text)

    assert result.exit_code == 0, result.stderr
    assert f"note: {note.replace('{folder}', str(folder))}" in result.stderr.splitlines()


@pytest.mark.parametrize("path", ["config.toml", "examples/own_reward/grpo.toml"])
def test_configurations_of_the_project_have_no_notes(path: str) -> None:
    assert notes(load(Path(__file__).parents[2] / path, (), {})) == []
