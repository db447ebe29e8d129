"""Mistakes of a new user, found by trying: each was answered by silence, a traceback or a wrong cause.

| mistake | answer before | answer now |
|---|---|---|
| ``start grpo.toml`` | unexpected extra argument | names ``--config`` |
| ``start --max-steps 3`` | no such option | names ``--set trainer.max_steps=VALUE`` |
| ``start --set trainer.max_steps 3`` | unexpected extra argument | names ``--set trainer.max_steps=3`` |
| ``strat`` | no such command | names ``start`` |
| prompts as one JSON array, or an object over several lines | up to 20 lines of "not JSON" | one line with jq |
| prompts as Parquet or gzip | "not UTF-8" | the format's name |
| ``rewards = ["my_rewards.py:exact"]`` | a worker fails | "did you mean my_rewards:exact?" |
| ``def reward(completions, answer)`` of other trainers | a worker fails, TypeError | the parameters |
| an adapter's folder as ``model.actor`` | "no config.json" | says that it is an adapter |
| a model cloned without Git LFS, cut, or without one of its files | five starts of each process, "header too large" | \
names the file before the start |
| a model without a tokenizer, an encoder-decoder, GGUF | an error at the start of a worker | named before the start |
| a quantized model | five starts of each process, ImportError | named before the start |
| weights of a wrapper (``module.``) | silence: random weights are trained | `tests/models/test_refusals.py` |
| an encoder, such as BERT | silence: log-probs that see later tokens | `tests/models/test_refusals.py` |
| weights that are NaN | "reads the padding" | `tests/models/test_refusals.py` |
| ``publish`` of weights that are NaN, or of the model itself | the run ends, prompts at fault; AttributeError | \
`tests/trainer/test_publish_check.py` |
| a reward module of the name of an installed one (``test.py``) | "test has no function" | both files |
| PPO's keys with GRPO, LoRA's without a rank, ... | silence | a note for each key without effect |
| ``trainer.max_steps = 1000`` | silence: after 150 steps a tenth of the learning rate | a note |
| ``rollout.max_length`` beyond the model's positions | silence | a note |
| texts as prompts of a chat model | silence: the template is not applied | a note |
| a tokenizer without an end token | TypeError in each rollout | `tests/rollout/test_lengths.py` |
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from pipeline.cli.main import main
from pipeline.config import sections, user_modules
from pipeline.config.load import load
from pipeline.config.rewards import table_of
from pipeline.errors import ConfigError, ExitCode
from pipeline.rollout.reward.named import named_reward
from pipeline.supervisor import preflight
from pipeline.supervisor.notes import notes
from tests.support.folders import save_shell

OWN = '[prompts]\npath = "builtin:sort-digits"\n[[rewards]]\nname = "exact"\n'
"""Tables without which a model of its own is refused."""


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(autouse=True)
def shells_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are shells here, whose tokenizer is none; `tests/rollout/test_start_check.py` loads real ones."""
    monkeypatch.setattr(preflight, "findings_of_start", lambda loaded: ([], []))


def test_what_a_module_reads_and_prints_at_its_import_is_no_mistake(folder: Path) -> None:
    (folder / "busy.py").write_text(
        "import atexit, sys\n"
        "sys.stdout.buffer.write(b'\\xff' + sys.stdin.buffer.read())\n"
        "atexit.register(print, 'the end')\n"
        "def score(input_ids, attention_mask, **_): return 1.0\n"
    )

    functions = [(name, user_modules.AUTO) for name in ("busy:score", "busy:none")]
    assert user_modules.problems_of_import(functions, [str(folder)]) == [
        f"busy has no function none: {folder / 'busy.py'}"
    ]


def test_a_module_that_ends_the_process_at_its_import_is_a_mistake(folder: Path) -> None:
    (folder / "gone.py").write_text("import os\nos._exit(3)\n")

    assert user_modules.problems_of_import([("gone:score", user_modules.AUTO)], [str(folder)]) == [
        "gone:score: the import ended the process with exit code 3"
    ]


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
        (("start", "--set", "trainer.max_steps", "3"), "A value is given by --set trainer.max_steps=3"),
        (("start", "--max-steps", "3"), "Keys are set by --set trainer.max_steps=VALUE"),
        (("start", "--lr", "3"), "Keys are set by --set trainer.learning_rate=VALUE"),
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
        (b"\x1f\x8b\x08\x00", "the file is compressed by gzip, not JSON lines"),
    ],
)
def test_prompts_of_another_format_are_one_line(content: bytes, message: str) -> None:
    Path("p").write_bytes(content)

    result = check('[prompts]\npath = "p"\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{Path('p').absolute()}:1:1: {message}")


REWARDS = """
def exact(ids, mask, **_): return 1.0
def columns(ids, mask, *, level, gt_answer, response, response_start, response_end, tokenizer, words=()): return 1.0
class Scorer:
    def __call__(self, ids, mask, gt_answer, **rest): return 1.0
scorer = Scorer()
def theirs(text, truth): return 1.0
def nothing(): return 1.0
def of_openrlhf(queries, prompts, labels): return [1.0]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards.py:exact", "cannot import my_rewards.py: my_rewards is a module, no package, did you mean "
                                "my_rewards:exact?"),
        ("my_reward:exact", "cannot import my_reward: there is no module my_reward; looked in {folder}"),
        ("my_rewards:exakt", "my_rewards has no function exakt"),
        ("broken:exact", "cannot import broken: ValueError: no luck"),
        ("my_rewards:theirs", "my_rewards:theirs cannot be called ({folder}/my_rewards.py:7), got an unexpected "
                              "keyword argument 'gt_answer': its parameters are (input_ids, attention_mask, *, "
                              "gt_answer, response_start, response_end, tokenizer), and **_ takes those that it does "
                              "not use"),
        ("my_rewards:of_openrlhf", "my_rewards:of_openrlhf has the signature of OpenRLHF ({folder}/my_rewards.py:9), "),
        ("my_rewards:nothing", "my_rewards:nothing cannot be called ({folder}/my_rewards.py:8), too many positional "),
    ],
)  # fmt: skip
def test_reward_modules_that_do_not_import_are_found_by_the_check(folder: Path, name: str, message: str) -> None:
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("raise ValueError('no luck')\n")

    result = check(f'rewards = ["{name}"]\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"c.toml:1:11: rewards: {message.replace('{folder}', str(folder))}")


def test_a_function_of_two_tables_is_checked_by_the_style_of_each(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(REWARDS)
    table = '[[rewards]]\nname = "my_rewards:columns"\n'

    for styled in (f'{table}style = "trl"\n{table}', f'{table}{table}style = "trl"\n'):
        (line,) = check(styled).stderr.splitlines()
        assert 'my_rewards:columns does not fit style = "trl"' in line


@pytest.mark.parametrize("name", ["exact", "columns", "scorer"])
def test_reward_functions_of_any_form_that_can_be_called_are_right(folder: Path, name: str) -> None:
    (folder / "my_rewards.py").write_text(REWARDS)

    result = check(f'rewards = ["my_rewards:{name}"]\n')

    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("key", ["trainer.policy_loss", "rollout.advantages", "rollout.engine"])
def test_a_function_of_ones_own_that_is_not_there_is_found_by_the_check(folder: Path, key: str) -> None:
    (folder / "my_module.py").write_text("def mine(inputs): return inputs\n")
    section, _, name = key.partition(".")

    def checked(function: str) -> Result:
        return check(f'[{section}]\n{name} = "{function}"\n')

    assert checked("my_module:mine").exit_code == 0
    for function, message in (
        ("my_module:other", "my_module has no function other"),
        ("my_loss:mine", "cannot import my_loss: there is no module my_loss"),
    ):
        bad = checked(function)
        assert bad.exit_code == ExitCode.BAD_CONFIG
        (line,) = bad.stderr.splitlines()
        assert line.startswith(f"c.toml:2:{len(name) + 4}: {key}: {message}")


def test_reward_modules_are_looked_up_in_the_configurations_folder(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there/rewards_there.py").write_text(REWARDS)
    (folder / "there/c.toml").write_text('rewards = ["rewards_there:exact"]\n')

    result = rlhfd("config", "check", "--config", "there/c.toml")

    assert (result.exit_code, result.stdout) == (0, "there/c.toml: ok\n"), result.stderr


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["adapter_config.json"], "is a LoRA adapter: merge it into its model first"),
        # Transformers would load the adapter's base model in its place.
        (["adapter_config.json", "config.json"],
         "has config.json and adapter_config.json: remove the one that is not used"),
    ],
)  # fmt: skip
def test_an_adapter_is_not_taken_for_a_model(folder: Path, names: list[str], message: str) -> None:
    (folder / "adapter").mkdir()
    for name in names:
        (folder / "adapter" / name).write_text("{}")

    result = check('[model]\nactor = "adapter"\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    assert f"adapter {message}" in result.stderr


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return a change of the weights' file."""
    return lambda folder: (path := folder / "model.safetensors").write_bytes(change(path.read_bytes()))


def described(**changes: object) -> Callable[[Path], object]:
    """Return a change of config.json."""
    return lambda folder: (folder / "config.json").write_text(json.dumps(changes))


def of_torch(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return a change of weights in an archive, as torch.save writes it."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            archive.writestr("archive/data.pkl", "the weights")
        (folder / "pytorch_model.bin").write_bytes(change(whole.getvalue()))

    return write


def in_two_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"lm_head.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewritten(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988\n"),
         "m/model.safetensors is a pointer of Git LFS without the content: run git lfs pull in its folder"),
        (rewritten(lambda whole: whole[:-5]), "m/model.safetensors is cut: it has "),
        (rewritten(lambda _: b"<!DOCTYPE html><html>Not found</html>"), "m/model.safetensors is no safetensors file: "),
        (rewritten(lambda _: b""), "m/model.safetensors is empty: download it again"),
        (of_torch(lambda whole: whole[: len(whole) // 2]), "m/pytorch_model.bin is cut: download it again"),
        (of_torch(lambda whole: whole.replace(b"weights", b"weighty")), "m/pytorch_model.bin is damaged: Bad CRC-32"),
        (of_torch(lambda _: b""), "m/pytorch_model.bin is empty: download it again"),
        (in_two_files, "m/model-00002-of-00002.safetensors is missing, model.safetensors.index.json names it"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "q4.gguf"), "GGUF is not read, take model.saf"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "own.safetensors"),
         "m: transformers does not load own.safetensors without model.safetensors.index.json, take model.safetens"),
        (described(transformers_weights="own.safetensors"), "m/own.safetensors is missing, config.json names it: "),
        (described(transformers_weights="own.safetensors.index.json"), "own.safetensors.index.json in "),
        (lambda folder: (folder / "model.safetensors").unlink(), "m: take model.safetensors as save_pretrained"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "m: copy the model's tokenizer.json and token"),
        (lambda folder: (folder / "config.json").write_text("["), "cannot be read: "),
        (described(is_encoder_decoder=True, model_type="t5"), "m is an encoder-decoder (t5): take a causal language"),
        (described(quantization_config={"quant_method": "awq"}), "m is quantized (awq), its weights cannot be trained"),
    ],
    ids=["LFS", "cut", "a page", "empty", "old, cut", "old, damaged", "old, empty", "a file short",
         "GGUF", "another name", "named", "named index", "no weights", "no tokenizer", "no JSON", "T5", "quantized"],
)  # fmt: skip
def test_a_model_that_cannot_be_used_is_named_before_the_start(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(save_shell(folder / "m"))

    result = check(f'[model]\nactor = "m"\n{OWN}')

    assert result.exit_code == ExitCode.BAD_CONFIG
    (line,) = result.stderr.splitlines()
    assert line.startswith("c.toml:2:9: model.actor: ") and message in line


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(input_ids, attention_mask, *, response, level, answer, **_): ...",
         "needs the column 'level' ({}:1), the first prompts have tags"),
        ("def score(completions, prompts, answer, solution, tags, **_): ...",
         "needs the column 'solution' ({}:1), the first prompts have tags"),
        ("def score(input_ids, attention_mask, *, tags, gt_answer, level=3, pixel_values, prompt, **_): ...", ""),
        ("def score(completions, answer, **columns): ...", ""),
        ("def score(data_source, solution_str, ground_truth, extra_info): ...", ""),
    ],
)  # fmt: skip
def test_a_column_that_a_reward_function_needs_and_no_prompt_has_is_told_before_the_start(
    folder: Path, code: str, message: str
) -> None:
    """The first rollouts of the start found it, and config check said that the configuration is right."""
    (folder / "columns_of_rows.py").write_text(code)
    (folder / "p.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "1", "tags": 1}\n')

    result = check('rewards = ["columns_of_rows:score"]\n[prompts]\npath = "p.jsonl"\n')

    assert (result.exit_code == 0) == (not message), result.stderr
    assert message.format(folder / "columns_of_rows.py") in result.stderr


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988\n"
OF_LFS = " is a pointer of Git LFS without the content: run git lfs pull in its folder"
TABLE = "prompt,response\nwhat,1\n"


def written(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_file_of_another_kind_is_named_with_the_way_out_wherever_one_is_named(folder: Path) -> None:
    save_shell(folder / "m")
    for name, files in {
        "indexed": {"model.safetensors.index.json": '{"weight_map": {"a": "part/1.safetensors"}}',
                    "part/1.safetensors": POINTER},
        "templates": {"additional_chat_templates/tools.jinja": POINTER},
        "a": {"adapter_config.json": "{}", "adapter_model.safetensors": POINTER},
        "no-weights": {"adapter_config.json": "{}", "adapter_model.bin": b""},
        "cached": {"refs/main": "4d7a", "snapshots/4d7a/config.json": "{}"},
    }.items():  # fmt: skip
        if name in ("indexed", "templates"):
            save_shell(folder / name)
        written(folder / name, files)  # type: ignore[arg-type]
    written(folder, {"pointer": POINTER, "wide": TABLE.encode("utf-16"), "table": TABLE, "b.parquet": b"PAR1PAR1"})
    adapter = '[model]\nactor = "m"\nlora_rank = 4\nlora_adapter = '

    for text, message in {
        '[model]\nactor = "indexed"\n': f"model.actor: {folder}/indexed/part/1.safetensors{OF_LFS}",
        '[model]\nactor = "templates"\n':
            f"model.actor: {folder}/templates/additional_chat_templates/tools.jinja{OF_LFS}",
        '[model]\nactor = "Qwen/Qwen2.5-0.5B@main"\n': "hf download Qwen/Qwen2.5-0.5B --local-dir FOLDER, and that",
        '[model]\nactor = "https://huggingface.co/Qwen/Qwen3-8B"\n': "hf download Qwen/Qwen3-8B --local-dir FOLDER",
        '[model]\nactor = "models/Qwen3-8B"\n': "hf download OWNER/Qwen3-8B --local-dir FOLDER, and that folder here",
        '[model]\nactor = "/nowhere/gpt2"\n': "no such directory: /nowhere/gpt2 (models are local, none is downloaded)",
        '[model]\nactor = "gpt2"\n': "for a model of the hub: hf download gpt2 --local-dir FOLDER, and that",
        '[model]\nactor = "cached"\n': f"no config.json in {folder}/cached: take {folder}/cached/snapshots/4d7a",
        f'{adapter}"a"\n': f"model.lora_adapter: {folder}/a/adapter_model.safetensors{OF_LFS}",
        f'{adapter}"someone/adapter"\n': "hf download someone/adapter --local-dir FOLDER, and that folder here",
        f'{adapter}"no-weights"\n': f"no adapter_model.safetensors in {folder}/no-weights: no adapter of peft",
        '[prompts]\ntools_file = "pointer"\n': f"prompts.tools_file: {folder}/pointer{OF_LFS}",
        '[prompts]\ntools_file = "wide"\n':
            "prompts.tools_file: the file is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 wide prints it as UTF-8",
        '[prompts]\ntools_file = "table"\n': f"prompts.tools_file: {folder}/table is CSV, not JSON",
    }.items():  # fmt: skip
        result = check(text if "[prompts]" in text else text + OWN)
        (line,) = result.stderr.splitlines()
        assert (result.exit_code, message in line) == (ExitCode.BAD_CONFIG, True), line

    tables = {"judge": {"url": "http://h", "model": "m"}, "json_schema": {}}
    for name, key, file, message in (
        ("judge", "template_file", "pointer", f"{folder}/pointer{OF_LFS}"),
        ("judge", "template_file", "wide", "the file is UTF-16, not UTF-8"),
        ("judge", "template_file", "table", "table has no {response}, the place of the response"),
        ("json_schema", "schema_file", "pointer", f"{folder}/pointer{OF_LFS}"),
        ("json_schema", "schema_file", "table", "table is CSV, not JSON"),
    ):
        settings = table_of(name).model_validate({"name": name, **tables[name], key: str(folder / file)})
        with pytest.raises(ConfigError) as refused:
            named_reward(settings)
        assert str(refused.value).startswith(f"rewards.{name}.{key}: ") and message in str(refused.value)

    for file, message in (
        ("pointer", f"{folder}/pointer{OF_LFS}"), ("wide", "the file is UTF-16, not UTF-8"),
        ("table", "the file is CSV, not JSON lines"), ("b.parquet", "the file is Parquet, not JSON lines"),
    ):  # fmt: skip
        result = rlhfd("try-reward", str(folder / file))
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"{folder / file}:1:1: ") and message in line


def test_weights_of_torch_are_taken_and_a_reference_may_be_quantized(folder: Path) -> None:
    save_shell(folder / "m")
    of_torch(lambda whole: whole)(folder / "m")
    save_shell(folder / "r", quantization_config={"quant_method": "awq"})
    (folder / "r/tokenizer_config.json").unlink()

    result = check(f'[model]\nactor = "m"\nreference = "r"\n{OWN}')

    assert result.exit_code == 0, result.stderr


def test_a_reward_module_behind_an_installed_one_is_told_both_files(folder: Path) -> None:
    (folder / "test.py").write_text("def exact(*_, **__):\n    return 1.0\n")

    result = check('rewards = ["test:exact"]\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    assert "test has no function exact: it is " in result.stderr
    assert f"test/__init__.py, which comes before {folder}/test.py; rename your own" in result.stderr


def model(folder: Path, **config: int) -> Path:
    save_shell(folder / "m", **config)
    (folder / "m/chat_template.jinja").write_text("{{ messages }}")
    (folder / "p").write_text('{"prompt": "7 + 8", "answer": 15}\n')
    return folder / "m"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("[rollout]\nmax_turns = 4\n", "c.toml:2:13: rollout.max_turns: has no effect with no rollout.environment"),
        ("[rollout]\nlam = 0.9\n", 'c.toml:2:7: rollout.lam: has no effect with rollout.algorithm = "grpo"'),
        ("[trainer]\ndr_grpo_tokens = 9\n",
         'c.toml:2:18: trainer.dr_grpo_tokens: has no effect with trainer.loss_aggregation = "token_mean"'),
        ('[trainer]\npolicy_loss = "gspo"\n',
         "c.toml:2:15: trainer.policy_loss: gspo clips the ratio of a whole sequence, which trainer.clip_range = 0.2 "
         "hardly ever does: the paper has trainer.clip_low = 3e-4 and trainer.clip_high = 4e-4"),
        ('[trainer]\nkl_estimator = "k1"\n',
         "c.toml:2:16: trainer.kl_estimator: the gradient of k1 in the loss is 0 on average: k2 and k3 hold the policy "
         "near the reference"),
        (
            "[trainer]\ntarget_kl = 0.1\n",
            "c.toml:2:13: trainer.target_kl: has no effect with trainer.epochs = 1 and trainer.mini_batches = 1",
        ),
        (
            '[trainer]\npolicy_loss = "reinforce"\nepochs = 2\n',
            "c.toml:2:15: trainer.policy_loss: reinforce has no ratio: every update of a step but the first is biased, "
            "with trainer.epochs = 2 and trainer.mini_batches = 1",
        ),
        (
            '[rollout]\nlog_probs = "worker"\n[trainer]\npolicy_loss = "reinforce"\n',
            "c.toml:4:15: trainer.policy_loss: reinforce corrects for no staleness, with buffer.max_staleness = 1: set "
            'it to 0, or rollout.log_probs = "trainer" without a KL in the reward and a trainer.importance_correction',
        ),
        (
            '[trainer]\npolicy_loss = "reinforce"\nimportance_correction = "none"\n',
            "c.toml:2:15: trainer.policy_loss: reinforce corrects for no staleness, with buffer.max_staleness = 1: set "
            'it to 0, or rollout.log_probs = "trainer" without a KL in the reward and a trainer.importance_correction',
        ),
        (
            '[rollout]\nalgorithm = "ppo"\n[trainer]\nmax_steps = 10\n',
            "c.toml:4:13: trainer.max_steps: 10 steps, of which the first 10 (trainer.critic_warmup_steps) train the "
            "critic alone: the actor is never trained",
        ),
        ('[trainer]\nimportance_cap = 3.0\n',
         'c.toml:2:18: trainer.importance_cap: has no effect with rollout.log_probs = "engine"'),
        ('[rollout]\nlog_probs = "engine"\n[trainer]\nimportance_cap = 3.0\n',
         'c.toml:4:18: trainer.importance_cap: has no effect with rollout.log_probs = "engine"'),
        ('[rollout]\nlog_probs = "trainer"\n[trainer]\nclip_low = 0.1\n',
         'c.toml:4:12: trainer.clip_low: has no effect with rollout.log_probs = "trainer"'),
        (
            '[model]\nreference_device = "host"\n[trainer]\nkl_coef = 0.0\n',
            "c.toml:2:20: model.reference_device: has no effect with trainer.kl_coef = 0 and rollout.kl_coef = 0",
        ),
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
            f'[model]\nactor = "m"\n[trainer]\nlearning_rate = 0.02\n{OWN}',
            "c.toml:4:17: trainer.learning_rate: 0.02 is far above that of any model of its own: 1e-6 to 1e-5 for all "
            "weights, to 1e-3 for adapters",
        ),
        (
            "[buffer]\nsample_batch_size = 100\n",
            "c.toml:2:21: buffer.sample_batch_size: 100 rows are no multiple of the 8 responses to a prompt "
            "(rollout.num_generations): groups are divided between batches; multiples are 96 and 104",
        ),
        (
            "[buffer]\nsample_batch_size = 6\n[trainer]\nworld_size = 2\n",
            "c.toml:2:21: buffer.sample_batch_size: 12 rows a version are no multiple of the 8 responses to a prompt "
            "(rollout.num_generations): groups are divided between batches; multiples are 4 and 8",
        ),
        (
            f'[model]\nactor = "m"\n{OWN}[rollout]\nmax_length = 1024\n',
            "c.toml:2:9: model.actor: the model was made for 512 tokens (max_position_embeddings), rows have up to "
            "1,024 (rollout.max_length)",
        ),
        (
            '[prompts]\npath = "p"\n',
            '{folder}/p:1:1: answer is the number 15, not a text: gt_answer of reward functions is then int 15, '
            'unequal to the text of any response; for a text write "15"',
        ),
        (
            '[prompts]\npath = "q"\n',
            "{folder}/q:2:1: no answer here and in 1 more of the first 3 rows, which others have: gt_answer of reward "
            "functions is then None; prompts.answer_column refuses such rows",
        ),
        (
            '[model]\nactor = "m"\n[prompts]\npath = "p"\n[[rewards]]\nname = "exact"\n',
            "prompts.template: the prompts are texts, and the model's chat template is not applied to them: \"chat\" "
            'applies it, "none" states that none is wanted',
        ),
    ],
)  # fmt: skip
def test_what_can_run_and_is_hardly_meant_is_noted(folder: Path, text: str, note: str) -> None:
    model(folder, max_position_embeddings=512)
    (folder / "q").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n{"prompt": "d", "answer": null}\n')

    result = check(text)

    assert result.exit_code == 0, result.stderr
    assert f"note: {note.replace('{folder}', str(folder))}" in result.stderr.splitlines()


@pytest.mark.parametrize("settings", ['{"chat_template": "{{ messages }}"}', '{"chat_template": null}', "[", "[]"])
def test_a_chat_template_in_the_settings_of_the_tokenizer_is_noted_as_one_of_a_file(
    folder: Path, settings: str
) -> None:
    model(folder, max_position_embeddings=512)
    (folder / "m/chat_template.jinja").unlink()
    (folder / "m/tokenizer_config.json").write_text(settings)

    result = check('[model]\nactor = "m"\n[prompts]\npath = "p"\n[[rewards]]\nname = "exact"\n')

    assert ("chat template is not applied" in result.stderr) == ("messages" in settings), result.stderr


@pytest.mark.parametrize(
    ("targets", "is_noted"), [("", True), ('lora_targets = ["w1"]\n', True), ('lora_targets = ["q_proj"]\n', False)]
)
def test_experts_that_get_no_adapters_are_noted(folder: Path, targets: str, is_noted: bool) -> None:
    layer = "model.layers.0.block_sparse_moe"
    shapes = {
        "model.layers.0.self_attn.q_proj": (10, 10),
        f"{layer}.experts.0.w1": (5, 30),
        f"{layer}.experts.1.w1": (5, 30),
    }
    model(folder, hidden_size=10, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5, vocab_size=9)
    save_file({f"{name}.weight": numpy.zeros(shape, numpy.float32) for name, shape in shapes.items()},
              folder / "m/model.safetensors")  # fmt: skip

    result = check(f'[model]\nactor = "m"\nlora_rank = 2\n{targets}{OWN}')

    line, key = ("4:16", "lora_targets") if targets else ("3:13", "lora_rank")
    note = (
        f"note: c.toml:{line}: model.{key}: the experts of the mixture, 75% of its parameters, get no adapters and "
        "stay as they are: they are no linear layers in the model, as with peft's target_modules"
    )
    assert (note in result.stderr.splitlines()) is is_noted, result.stderr


def test_groups_that_are_whole_over_all_ranks_are_not_noted(folder: Path) -> None:
    result = check("[buffer]\nsample_batch_size = 4\n[trainer]\nworld_size = 2\n")

    assert result.exit_code == 0, result.stderr
    assert "sample_batch_size" not in result.stderr


def test_the_kl_of_the_loss_has_an_effect_with_an_external_trainer_too(folder: Path) -> None:
    """At 0 the worker loads no reference model."""
    result = check('[trainer]\nkind = "external"\nkl_coef = 0.0\n')

    assert "trainer.kl_coef" not in result.stderr


def test_held_out_prompts_that_are_prompts_of_training_are_counted(folder: Path) -> None:
    trained = ("7 + 8", " 9  + 1\n", [{"role": "user", "content": "3"}])
    (folder / "p").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in trained))
    held_out = ("9 + 1", "7 + 8", "7 + 8", [{"content": "3", "role": "user"}], "7 + 9")
    (folder / "h").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in held_out))
    (folder / "clean").write_text('{"prompt": "1 + 1"}\n')

    result = check('[prompts]\npath = "p"\n[evaluation]\nfiles = ["clean", "h"]\n')

    assert result.exit_code == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if "evaluation" in line] == [
        f"note: c.toml:4:9: evaluation.files: 4 of the 5 prompts of {folder}/h are in the prompts of training too: an "
        "evaluation on them shows what was learned by heart"
    ]


def test_a_key_of_the_evaluation_without_files_is_noted(folder: Path) -> None:
    result = check("[evaluation]\nevery = 5\n")

    assert "note: c.toml:2:9: evaluation.every: has no effect with evaluation.files = []" in result.stderr.splitlines()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '[evaluation]\nfiles = ["p", "none"]\n',
            "c.toml:2:9: evaluation.files: cannot read {folder}/none: No such",
        ),
        ('[evaluation]\nfiles = ["bad"]\n', '{folder}/bad:2:1: no key "prompt" among answer'),
        ("[evaluation]\nevery = 0\n", "c.toml:2:9: evaluation.every: must be at least 1, got 0"),
        ("[evaluation]\nevry = 5\n", "c.toml:2:1: unknown key evaluation.evry, did you mean every?"),
        (
            '[evaluation]\nfiles = ["p"]\nnum_generations = 4\npass_k = 8\n',
            "c.toml:4:10: evaluation.pass_k: must be at most the 4 of evaluation.num_generations, got 8",
        ),
        ('[metrics]\ntracker = ["no_such"]\n', "c.toml:2:12: metrics.tracker: must be"),
        ('[metrics]\ntracker = ["trackio"]\n',
         f"c.toml:2:11: metrics.tracker: trackio needs the package trackio: {sys.executable} -m pip install trackio"),
        ('[metrics]\ntracker = ["wandb", "wandb"]\n', "c.toml:2:11: metrics.tracker: must name each tracker once"),
        ('[metrics]\ntracker = ["wandb"]\n[trainer]\nkind = "external"\n',
         'c.toml:2:11: metrics.tracker: must be left out with trainer.kind = "external"'),
    ],
)  # fmt: skip
def test_mistakes_in_evaluation_and_trackers_are_named_with_their_place(
    folder: Path, text: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "p").write_text('{"prompt": "7 + 8"}\n')
    (folder / "bad").write_text('{"prompt": "7 + 8"}\n{"answer": "7 + 8"}\n')
    monkeypatch.setattr(sections, "_TRACKERS", {name: ("no_such_module", name) for name in sections._TRACKERS})

    result = check(text)

    assert result.exit_code == ExitCode.BAD_CONFIG
    assert result.stderr.startswith(error.replace("{folder}", str(folder)))


def test_an_optimizer_without_its_package_is_named_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))

    result = check('[trainer]\noptimizer = "adamw_8bit"\n')

    assert result.exit_code == ExitCode.BAD_CONFIG
    place, install = "c.toml:2:13: trainer.optimizer:", f"{sys.executable} -m pip install bitsandbytes"
    assert result.stderr.splitlines() == [f"{place} adamw_8bit needs the package bitsandbytes: {install}"]


@pytest.mark.parametrize("path", ["config.toml", "examples/own_reward/grpo.toml"])
def test_configurations_of_the_project_have_no_notes(path: str) -> None:
    assert notes(load(Path(__file__).parents[2] / path, (), {})) == []
