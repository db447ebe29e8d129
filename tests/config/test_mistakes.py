"""Every mistake in a configuration is shown at once, in a line each, at its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import load as config_load
from pipeline.config.advice import SECTIONS
from pipeline.config.load import ConfigErrors
from pipeline.config.rewards import REWARD_NAMES
from pipeline.supervisor.preflight import problems_of_files
from tests.support.folders import save_shell


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors_of(
    text: str | bytes = "", *sets: str, environ: dict[str, str] | None = None, files: bool = False
) -> list[str]:
    path = Path("config.toml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigErrors) as raised:
        config_load.load(path, sets, environ or {}, check_files=problems_of_files if files else None)
    assert str(raised.value) == "\n".join(raised.value.errors)
    return list(raised.value.errors)


ALL_KEYS = "`rlhfd config show --effective` lists all, docs/coming-from.md those of other trainers"
QUANTIZED = '[rollout]\nengine = "vllm"\nquantization = "fp8"'
OF_16_BITS = '[model]\ndtype = "bfloat16"'

MISTAKES = [
    # Sources of prompts, at their place in the list.
    (
        '[[prompts.sources]]\npath = "a"\n[[prompts.sources]]\npath = "b"\nweight = -1.0',
        "5:10: prompts.sources: weight must be greater than 0, got -1.0",
    ),
    (
        '[prompts]\nsources = [{path = "a", weight = 0}]',
        "2:34: prompts.sources: weight must be greater than 0, got 0",
    ),
    (
        '[[prompts.sources]]\npath = "a"\nwieght = 2.0',
        "3:10: prompts.sources: unknown key wieght, did you mean weight?",
    ),
    ("[[prompts.sources]]\nweight = 2.0", "1:11: prompts.sources: must have a path"),
    ('[prompts]\nsources = ["a"]', '2:12: prompts.sources: must be a table, got "a"'),
    (
        '[prompts]\npath = "a"\n[[prompts.sources]]\npath = "b"',
        "2:8: prompts.path: must be left out with prompts.sources, which take its place",
    ),
    (
        '[prompts]\ntemplate = "none"\nsystem_prompt = "s"',
        '3:17: prompts.system_prompt: must be left out with prompts.template = "none"',
    ),
    (
        "[prompts]\nmin_characters = 3\nmax_characters = 2",
        "3:18: prompts.max_characters: must be at least the 3 of prompts.min_characters, got 2",
    ),
    (
        '[prompts]\npass_rate_column = "r"\nmin_pass_rate = 0.5\nmax_pass_rate = 0.2',
        "4:17: prompts.max_pass_rate: must be at least the 0.5 of prompts.min_pass_rate, got 0.2",
    ),
    ('[prompts]\ncurriculum = "easy_first"', "2:14: prompts.curriculum: needs prompts.pass_rate_column"),
    (
        "[prompts.template_arguments]\ntokenize = true",
        "1:10: prompts.template_arguments: must not name tokenize, which rlhfd sets itself, got {tokenize = true}",
    ),
    (
        "[prompts.template_arguments]\na = [1]",
        "1:10: prompts.template_arguments: must be a table of texts, numbers, true and false, got {a = [1]}",
    ),
    ("[prompts]\nprompt_key = 'q'", "2:1: unknown key prompts.prompt_key, did you mean prompt_column?"),
    # Dynamic sampling.
    (
        '[rollout]\nmax_refill = 2\nadvantages = "mine:estimate"',
        "2:14: rollout.max_refill: must be 0 unless rollout.advantages is one of grpo, dr_grpo, rloo: with others "
        "equal rewards carry a signal, got 2",
    ),
    (
        "[trainer]\nmini_batches = 3",
        "2:16: trainer.mini_batches: must divide the 256 rows of a step, got 3: updates would be of unequal size",
    ),
    # Unknown keys and sections, at the key.
    (
        '[cluster]\naddress = "ray://head:10001"',
        '2:11: cluster.address: must be host:port of the head of a Ray cluster, or "auto", got "ray://head:10001"',
    ),
    ("[trainer]\nppo_epochs = 2", "2:1: unknown key trainer.ppo_epochs, did you mean epochs?"),
    (
        "[trainer]\nkl_target = 6",
        "2:1: unknown key trainer.kl_target, OpenRLHF's kl_target is missing here: the weight in the reward is "
        "constant; trainer.kl_coef_target adapts the one in the loss, over 10,000 rows (docs/coming-from.md)",
    ),
    ("[rollout]\n  'temprature'=0.7", "2:3: unknown key rollout.temprature, did you mean temperature?"),
    ("rollout.temprature = 0.7", "1:9: unknown key rollout.temprature, did you mean temperature?"),
    ("rollout = { top_p = 1.0, temprature = 0.7 }", "1:26: unknown key rollout.temprature, did you mean temperature?"),
    ("[rollout]\narena_bytes = 1", "2:1: unknown key rollout.arena_bytes, did you mean buffer.arena_bytes?"),
    ("[trainer]\npublish-every = 1", "2:1: unknown key trainer.publish-every, did you mean publish_every?"),
    ("[trainer]\nLearning_Rate = 1", "2:1: unknown key trainer.Learning_Rate, did you mean learning_rate?"),
    (
        "[rollout]\nzzz = 1",
        f"2:1: unknown key rollout.zzz, {ALL_KEYS}",
    ),
    (
        '[rollout]\n"a\\nb" = 1',
        f'2:1: unknown key rollout."a\\nb", {ALL_KEYS}',
    ),
    (
        "[rollout.nucleus]\ntop_p = 1",
        f"1:10: unknown key rollout.nucleus, {ALL_KEYS}",
    ),
    ("[rolout]\nworkers = 1", "1:2: unknown section rolout, did you mean rollout?"),
    ("[ rolout . deeper ]\nworkers = 1", "1:3: unknown section rolout, did you mean rollout?"),
    ("[optimizer]", f"1:2: unknown section optimizer, the sections are {', '.join(SECTIONS)}"),
    ("temperature = 1.0", "1:1: unknown key temperature, did you mean rollout.temperature?"),
    (
        "# comment\n\nnonsense = 1",
        f"3:1: unknown key nonsense, {ALL_KEYS}",
    ),
    ("rollout = 3", "1:1: rollout: must be a section [rollout], got 3"),
    ("[[metrics]]\nport = 1", "1:3: metrics: must be a section [metrics], got [{port = 1}]"),
    # Wrong values, at the value.
    ("[buffer]\narena_bytes=-5", "2:13: buffer.arena_bytes: must be greater than 0, got -5"),
    (
        '[buffer]\narena_bytes = "64MB"',
        ('2:15: buffer.arena_bytes: must be a number of bytes or a text such as "64MiB" or "2GiB", got "64MB"'),
    ),
    ('[rollout]\nworkers = "8"', '2:11: rollout.workers: must be an integer, got "8"'),
    ("[rollout]\nworkers = true", "2:11: rollout.workers: must be an integer, got true"),
    ("[rollout]\nworkers = 0", "2:11: rollout.workers: must be at least 1, got 0"),
    ("[rollout]\nworkers = 1979-05-27", "2:11: rollout.workers: must be an integer, got 1979-05-27"),
    ("[rollout.workers]\nmany = 1", "1:10: rollout.workers: must be an integer, got {many = 1}"),
    ("[rollout]\nworkers.many = 1", "2:1: rollout.workers: must be an integer, got {many = 1}"),
    (
        '[rollout]\nlong_prompts = "cut_left"',
        "2:16: rollout.long_prompts: needs rollout.max_prompt_length: a cut prompt would leave one token to respond",
    ),
    (
        '[trainer]\nadvantage_scale = "batch"',
        '2:19: trainer.advantage_scale: must be "none" unless rollout.advantages is dr_grpo, rloo or your own: those '
        'of "grpo" are scaled already',
    ),
    (
        '[trainer]\nadvantage_scale = "batch"\nwhiten_advantages = false\n[rollout]\nalgorithm = "ppo"',
        '2:19: trainer.advantage_scale: must be "none" with rollout.algorithm = "ppo", whose advantages '
        "trainer.whiten_advantages scales",
    ),
    (
        "[trainer]\nnormalize_values = true",
        '2:20: trainer.normalize_values: must be false with rollout.algorithm = "grpo", which has no critic',
    ),
    (
        '[rollout]\nalgorithm = "ppo"\n[trainer]\nkind = "external"\nnormalize_values = true',
        '5:20: trainer.normalize_values: must be false with trainer.kind = "external", whose loss is its own',
    ),
    (
        '[rollout]\nreward_scale = "running"',
        '2:16: rollout.reward_scale: must be "none" unless rollout.advantages is gae, dr_grpo, rloo or your own: those '
        'of "grpo" do not depend on the scale of scores',
    ),
    (
        '[rollout]\nadvantages = "rloo"\nreward_scale = "running"\n[trainer]\nadvantage_scale = "batch"',
        '3:16: rollout.reward_scale: must be "none" with trainer.advantage_scale = "batch", which divides by the scale '
        "again",
    ),
    (
        '[rollout]\nadvantages = "rloo"\nreward_scale = "running"\n[trainer]\nkind = "external"',
        '3:16: rollout.reward_scale: must be "none" with trainer.kind = "external", which publishes no moments',
    ),
    ("[prompts]\nshuffle = 2", "2:11: prompts.shuffle: must be true or false, got 2"),
    (
        '[prompts]\nshuffle = 0\npass_rate_column = "rate"\ncurriculum = "easy_first"',
        '2:11: prompts.shuffle: must be true with prompts.curriculum = "easy_first"',
    ),
    ("[rollout]\ntemperature = inf", "2:15: rollout.temperature: must be finite, got inf"),
    (
        '[rollout]\nalgorithm = "dpo"',
        '2:13: rollout.algorithm: must be grpo, ppo, dapo, dr_grpo, rloo, gspo, cispo or reinforce++, got "dpo"',
    ),
    ("[rollout]\ndevices = []", '2:11: rollout.devices: must be "auto" or name at least one device, got []'),
    (
        "[rollout]\ndevices = [0, 1, 0]",
        "2:11: rollout.devices: must name each device once, got [0, 1, 0]",
    ),
    (
        '[rollout]\ndevices = ["0"]',
        '2:11: rollout.devices: must be "auto" or a list of device numbers, got ["0"]',
    ),
    ("[rollout]\ndevices = [-1]", '2:11: rollout.devices: must be "auto" or a list of device numbers, got [-1]'),
    (
        'rewards = [\n  "a.b:c",  # [\n  "nonsense",\n]',
        f'3:3: rewards: must be one of {", ".join(REWARD_NAMES)}, or of the form "module:function", got "nonsense"',
    ),
    ("rewards = ['a:b', 3]", "1:19: rewards: must be a name or a table, got 3"),
    ("rewards = 'a:b'", '1:11: rewards: must be tables [[rewards]], or a list of names, got "a:b"'),
    ("[rewards]\nname = 'a:b'", '1:2: rewards: must be tables [[rewards]], or a list of names, got {name = "a:b"}'),
    ("[[rewards]]\nweight = 2.0", "1:3: rewards: must have a name"),
    ("[[rewards]]\nname = 3", "2:8: rewards: must be a string, got 3"),
    (
        "[[rewards]]\nname = 'judge'\nurl = 'http://h'\nmodel = 'm'\nmodle = 'n'",
        "5:9: rewards.judge: unknown key modle, did you mean model?",
    ),
    (
        "rewards = ['math', {name = 'regex', tags = ['a']}]",
        "1:44: rewards.regex: unknown key tags, the keys are name, weight, pattern",
    ),
    ("[[rewards]]\nname = 'a:b'\nurl = 'x'", "3:7: rewards.b: unknown key url, the keys are name, weight, style"),
    (
        "[metrics]\nport = 1\nrewards = ['math']",
        "3:1: unknown key metrics.rewards, did you mean rewards? a table [[rewards]] with a name for each function, or "
        'rewards = ["math", "format"] above all sections',
    ),
    (
        "[rollout]\nstop_token_ids = [[1], []]",
        (
            "2:18: rollout.stop_token_ids: must be a token id, a list of ids, or a list of sequences "
            "such as [[5, 6], [7]], got [[1], []]"
        ),
    ),
    (
        "[trainer]\nbetas = [0.9, 1.0]",
        ("2:9: trainer.betas: must be a list of two numbers, each at least 0 and less than 1, got [0.9, 1.0]"),
    ),
    (
        "[trainer]\nbetas = [0.9]",
        "2:9: trainer.betas: must be a list of two numbers, each at least 0 and less than 1, got [0.9]",
    ),
    ("[metrics]\nport = 70_000", "2:8: metrics.port: must be at most 65535, got 70000"),
    ('[metrics]\nhost = ""', '2:8: metrics.host: must have at least 1 character, got ""'),
    (
        '[daemon]\nname = "Bad Name"',
        '2:8: daemon.name: must be made of a-z, 0-9 and -, got "Bad Name"',
    ),
    (
        "[daemon]\nseed = 9223372036854775808",
        "2:8: daemon.seed: must be less than 9223372036854775808, got 9223372036854775808",
    ),
    ('[daemon]\nruntime_dir = ""', '2:15: daemon.runtime_dir: must be a path, got ""'),
    ("[daemon]\nstate_dir = 3", "2:13: daemon.state_dir: must be a path, got 3"),
    (
        '[model]\nactor = "builtin:sort"',
        ('2:9: model.actor: must be one of builtin:sort-digits where it is no path, got "builtin:sort"'),
    ),
    ('[model]\nactor = ""', '2:9: model.actor: must be a path or one of builtin:sort-digits, got ""'),
    ("[model]\nreward = ['a']", '2:10: model.reward: must be a string, got ["a"]'),
    (
        f'[daemon]\nname = "{"x" * 65}"',
        f'2:8: daemon.name: must have at most 64 characters, got "{"x" * 59}...',
    ),
    (
        '[trainer]\npolicy_loss = "gpso"',
        '2:15: trainer.policy_loss: must be ppo, gspo, cispo, reinforce, or of the form "module:function", got "gpso"',
    ),
    (
        '[rollout]\nadvantages = "rlo"',
        "2:14: rollout.advantages: must be grpo, dr_grpo, rloo, reinforce_baseline, gae, or of the form "
        '"module:function", got "rlo"',
    ),
    (
        '[rollout]\nadvantages = "gae"',
        "2:14: rollout.advantages: must be grpo, dr_grpo, rloo, reinforce_baseline, or of the form "
        '"module:function", with rollout.algorithm = "grpo", got "gae"',
    ),
    (
        '[rollout]\nalgorithm = "ppo"\nadvantages = "rloo"',
        '3:14: rollout.advantages: must be gae, or of the form "module:function", with rollout.algorithm = "ppo", got '
        '"rloo"',
    ),
    (
        "[rollout]\noverlong_buffer_tokens = 4",
        "2:26: rollout.overlong_buffer_tokens: needs rollout.max_new_tokens: responses have no common maximum length",
    ),
    (
        "[rollout]\nmax_length = 24\nmax_new_tokens = 8\noverlong_buffer_tokens = 9",
        "4:26: rollout.overlong_buffer_tokens: must be at most the 8 tokens of a response, got 9",
    ),
    # Values that are right each by itself, at the one to change that was set.
    ("[rollout]\nnum_generations = 1", "2:19: rollout.num_generations: must be at least 2 with GRPO, got 1"),
    ("[model]\ncompile = 1", '2:11: model.compile: must be true, false or "auto", got 1'),
    (
        '[model]\ndtype = "float16"',
        '2:9: model.dtype: must be "bfloat16" or "float32" with trainer.kind = "builtin": gradients underflow in '
        "float16, and the trainer does not scale losses",
    ),
    (
        '[trainer]\nkind = "external"\nsharding = "full"',
        '3:12: trainer.sharding: must not be "full" with trainer.kind = "external", which shards its own models',
    ),
    (
        '[trainer]\nsharding = "hybrid"\nworld_size = 2',
        '2:12: trainer.sharding: must be "full" with trainer.nodes = 1: hybrid copies shards between machines',
    ),
    (
        '[trainer]\noptimizer = "muon"\nsharding = "hybrid"\nworld_size = 2\nnodes = 2\n[cluster]\nengine = "ray"',
        '2:13: trainer.optimizer: must be "adamw" with trainer.sharding = "hybrid": muon needs whole matrices',
    ),
    (
        '[trainer]\noptimizer = "muon"\nsharding = "full"\nworld_size = 2',
        '2:13: trainer.optimizer: must be "adamw" with trainer.sharding = "full": muon needs whole matrices',
    ),
    (
        '[trainer]\noptimizer = "muon"\n[model]\nlora_rank = 4',
        '2:13: trainer.optimizer: must be "adamw" or "adamw_8bit" with model.lora_rank: Muon trains whole matrices, '
        "not adapters",
    ),
    (
        '[trainer]\noptimizer = "muon"\nkind = "external"',
        '2:13: trainer.optimizer: must be left out with trainer.kind = "external", which has its own optimizer',
    ),
    ("[trainer]\nworld_size = 2\ndevices = [0]", "3:11: trainer.devices: names 1 for 2 ranks, each needs its own"),
    (
        "[buffer]\nmax_staleness = 0\n[rollout]\nnum_generations = 7",
        (
            "4:19: buffer.sample_batch_size: must be a multiple of the group of 7 with buffer.max_staleness "
            "= 0, got 256 rows a version"
        ),
    ),
    (
        "[rollout]\nmax_new_tokens = 64",
        "2:18: rollout.max_new_tokens: needs rollout.max_prompt_length or rollout.max_length (their sum) beside it",
    ),
    (
        "[rollout]\nmax_length = 64\nmax_new_tokens = 64",
        "3:18: rollout.max_new_tokens: must be below rollout.max_length = 64, it leaves no prompt, got 64",
    ),
    (
        "[rollout]\nmax_length = 64\nmax_prompt_length = 65",
        "3:21: rollout.max_prompt_length: must be below rollout.max_length = 64, it leaves no response, got 65",
    ),
    (
        "[rollout]\nmax_prompt_length = 48\nmax_length = 64\nmax_new_tokens = 32",
        (
            "3:14: rollout.max_length: must be the sum 48 of rollout.max_prompt_length + 32 of "
            "rollout.max_new_tokens = 80, or left out, got 64"
        ),
    ),
    (
        "[rollout]\nmax_prompt_length = 1_048_575\nmax_new_tokens = 2",
        (
            "2:21: rollout.max_prompt_length: must be at most 1048574 with rollout.max_new_tokens = 2: a row has at "
            "most 1048576 tokens, got 1048575"
        ),
    ),
    # No TOML at all.
    ("[daemon]\nname = rlhfd", "2:8: invalid value: a text is in quotes, true and false are in small letters"),
    ("[rollout\nworkers = 1", "1:9: expected ']' at the end of a table declaration"),
    ("[rollout]\nworkers = 1\nworkers = 2", "3:1: rollout.workers is set twice, first in line 2"),
    ("rollout.workers = 1\n[rollout]\nworkers = 2", "3:1: rollout.workers is set twice, first in line 1"),
    (b"[rollout]\nx = '\xff'", "2:6: not UTF-8 but byte 0xff, save the file as UTF-8"),
    # As other trainers call it, or in another section.
    ("[rollout]\nlr = 1e-6", "2:1: unknown key rollout.lr, did you mean trainer.learning_rate?"),
    ("[trainer]\nlr = 1e-6", "2:1: unknown key trainer.lr, did you mean learning_rate?"),
    ("[rollout]\nmax_tokens = 64", "2:1: unknown key rollout.max_tokens, did you mean max_new_tokens?"),
    ("[daemon]\nhang_timeout = 3", "2:1: unknown key daemon.hang_timeout, did you mean hang_timeout_s?"),
    ("[rollout]\nlearning_rat = 1", "2:1: unknown key rollout.learning_rat, did you mean trainer.learning_rate?"),
    (
        "[trainer]\nbeta = 0.1",
        "2:1: unknown key trainer.beta, TRL's beta is trainer.kl_coef here: TRL multiplies the KL by the ratio of the "
        "policies (use_bias_correction_kl), rlhfd does not (docs/coming-from.md)",
    ),
    (
        "[trainer]\nlogging_steps = 1",
        "2:1: unknown key trainer.logging_steps, TRL's logging_steps is needless here: each step is logged, as a line "
        "of metrics.jsonl; daemon.log_level is the level of the log; OpenRLHF's logger.logging_steps is needless here: "
        "each step is logged (docs/coming-from.md)",
    ),
    (
        "[critic]\nx = 1",
        "1:2: unknown section critic, a section of verl or OpenRLHF: `rlhfd init --from verl or openrlhf FILE` "
        "converts a file, docs/coming-from.md has their options",
    ),
    # The section that was written goes first: batch_size and kl_coef are keys of rollout too.
    ("[buffer]\nbatch_size = 64", "2:1: unknown key buffer.batch_size, did you mean sample_batch_size?"),
    ("[trainer]\nkl_coeff = 0.1", "2:1: unknown key trainer.kl_coeff, did you mean kl_coef?"),
    ("[trainer]\ntemperature = 1.0", "2:1: unknown key trainer.temperature, did you mean rollout.temperature?"),
    ("lr = 1", "1:1: unknown key lr, did you mean trainer.learning_rate?"),
    # Values are quoted as they were given, and no other one is suggested: "5m" may be minutes or a slip.
    ('[daemon]\nhang_timeout_s = "5m"', '2:18: daemon.hang_timeout_s: must be a number, got "5m"'),
    (
        '[daemon]\nlog_level = "WARN"',
        ('2:13: daemon.log_level: must be "debug", "info", "warning" or "error", got "WARN"'),
    ),
    (
        'rewards = ["my.rewards.exact"]',
        '1:12: rewards: must be of the form "module:function", got "my.rewards.exact"',
    ),
    (
        '[rollout]\ndevices = "0,1"',
        ('2:11: rollout.devices: must be "auto" or a list of device numbers, got "0,1"'),
    ),
    (
        '[rollout]\nstop_token_ids = ["</s>"]',
        (
            "2:18: rollout.stop_token_ids: must be a token id, a list of ids, or a list of sequences "
            'such as [[5, 6], [7]], got ["</s>"]'
        ),
    ),
    (
        '[trainer]\nlearning_rate = "1e-6"',
        '2:17: trainer.learning_rate: must be a number, got "1e-6"',
    ),
    ("[trainer]\nmax_steps = 1e3", "2:13: trainer.max_steps: must be an integer, got 1000.0"),
    ('[metrics]\nenabled = "yes"', '2:11: metrics.enabled: must be true or false, got "yes"'),
    ('[metrics]\ntls_cert = "c.pem"', "2:12: metrics.tls_cert: must be set together with metrics.tls_key"),
    (
        '[buffer]\njournal_interval_s = 5\n[trainer]\nkind = "external"',
        (
            "2:22: buffer.journal_interval_s: must be 0 with an external trainer: the rows that its checkpoints "
            "include are unknown"
        ),
    ),
    (
        "[trainer]\nmicro_batch_size = 512",
        ("2:20: trainer.micro_batch_size: must be at most the 256 rows of buffer.sample_batch_size, got 512"),
    ),
    (
        "[trainer]\nwarmup_steps = 20\ndecay_steps = 10",
        "3:15: trainer.decay_steps: must be 0 or at least the 20 of trainer.warmup_steps, got 10",
    ),
    (
        "rewards = []",
        "1:11: rewards: is empty and model.reward is not set: nothing would score a response",
    ),
    (
        "rewards = []\n[rollout]\nenvironment = 'calculator.Calculator'",
        '3:15: rollout.environment: must be of the form "module:Factory", got "calculator.Calculator"',
    ),
    ("[rollout]\nmax_turn_tokens = 4", "2:19: rollout.max_turn_tokens: needs rollout.environment"),
    ("[[rewards]]\nname = 'a:b'\nweight = nan", "3:10: rewards.b.weight: must be finite, got nan"),
    (
        "[[rewards]]\nname = 'length'\nlimit_tokens = 5\nbuffer_tokens = 6",
        "4:17: rewards.length.buffer_tokens: must be at most the 5 of limit_tokens, got 6",
    ),
    ("rewards = ['remote']", "1:12: rewards.remote: must have a url"),
    ("[[rewards]]\nname = 'judge'\nurl = 'http://h/v1'", "2:8: rewards.judge: must have a model"),
    (
        "[rollout]\nreward_timeout_s = 9\n[[rewards]]\nname = 'remote'\nurl = 'http://h/s'",
        "2:20: rewards.remote.deadline_s: must be below the 9 of rollout.reward_timeout_s, got 45",
    ),
    (
        "rewards = ['math']\n[rollout]\nreward_timeout_s = 5",
        "3:20: rollout.reward_timeout_s: must be above the 5 s of CPU that math gives a row, got 5",
    ),
    (
        "rewards = ['exact', 'length']\n[evaluation]\npass_function = 'math'",
        "3:17: evaluation.pass_function: must be one of rewards (exact, length), got math",
    ),
    (
        "rewards = ['exact', {name = 'code', timeout_s = 5}]\n[rollout]\nreward_timeout_s = 5",
        "1:49: rewards.code.timeout_s: must be below the 5 of rollout.reward_timeout_s, got 5",
    ),
    *(
        (f"[[rewards]]\nname = 'remote'\nurl = {url}", f"3:7: rewards.remote.url: {problem}")
        for url, problem in (
            ("'host:8000'", 'must be an address such as http://127.0.0.1:8000/score, got "host:8000"'),
            (
                "'http://me:secret@h/v1'",
                'must have no password: api_key_variable names a variable with one, got "http://***@h/v1"',
            ),
            ("'ftp://me:sec@ret@h/v1'", 'must be an address such as http://127.0.0.1:8000/score, got "ftp://***@h/v1"'),
            ("'me:se/cret \"x@h'", 'must be an address such as http://127.0.0.1:8000/score, got "***@h"'),
            ("['http://me:secret@h']", 'must be a string, got ["http://***@h"]'),
            ("'http://me:secret@[h'", 'must be an address such as http://127.0.0.1:8000/score, got "http://***@[h"'),
        )
    ),
    ("reward = 'http://me:secret@h'", "1:1: unknown key reward, did you mean model.reward?"),
    ("[trainer]\nmini_batches = 257", "2:16: trainer.mini_batches: must be at most the 256 rows of a step, got 257"),
    (
        "[buffer]\nsample_batch_size = 16\n[trainer]\nmini_batches = 65\nworld_size = 2\n"
        "gradient_accumulation_steps = 2",
        "4:16: trainer.mini_batches: must be at most the 64 rows of a step, got 65",
    ),
    (
        "[trainer]\nkl_coef = 0\nkl_coef_target = 0.1",
        "3:18: trainer.kl_coef_target: needs trainer.kl_coef above 0, the first value: a weight of 0 stays 0",
    ),
    (
        '[model]\nlora_rank = 513\n[rollout]\nengine = "vllm"',
        '2:13: model.lora_rank: must be at most 512 with rollout.engine = "vllm", got 513',
    ),
    (
        '[rollout]\nquantization = "fp8"',
        '2:16: rollout.quantization: must be "none" with rollout.engine = "transformers": only vllm quantizes weights',
    ),
    (
        '[rollout]\nengine = "vllm"\nquantization = "fp8"\n[model]\ndtype = "float32"',
        '5:9: model.dtype: must be "bfloat16" with rollout.quantization: vllm quantizes models of 16 bits alone',
    ),
    (
        f'{QUANTIZED}\n[model]\ndtype = "bfloat16"\nlora_rank = 4',
        '3:16: rollout.quantization: must be "none" with model.lora_rank',
    ),
    (
        f'{QUANTIZED}\nsleep = true\ncache_bytes = "2GiB"\n[buffer]\nmax_staleness = 0\n{OF_16_BITS}',
        '3:16: rollout.quantization: must be "none" with rollout.sleep',
    ),
    (
        f"{QUANTIZED}\ntensor_parallel = 2\n{OF_16_BITS}",
        "4:19: rollout.tensor_parallel: must be 1 with rollout.quantization: nobody has tried weights of 8 bits over "
        "several GPUs",
    ),
    (
        f'{QUANTIZED}\nlog_probs = "engine"\n{OF_16_BITS}',
        '4:13: rollout.log_probs: must be "worker" or "trainer" with rollout.quantization: the engine\'s are not those '
        "of the policy's weights",
    ),
    (
        f"{QUANTIZED}\ntop_p = 0.9\n{OF_16_BITS}",
        '3:16: rollout.quantization: must be "none" with rollout.top_p: rows then lack the log-probs of vllm, and '
        "nothing corrects",
    ),
    (
        f'{QUANTIZED}\n[trainer]\nimportance_correction = "none"\n{OF_16_BITS}',
        '5:25: trainer.importance_correction: must not be "none" with rollout.quantization: rows are sampled with '
        "other weights than those that are trained",
    ),
    (
        "[rollout]\ntensor_parallel = 2",
        '2:19: rollout.tensor_parallel: must be 1 with rollout.engine = "transformers": only vllm splits a model over '
        "GPUs",
    ),
    (
        '[rollout]\nengine = "vllm"\ntensor_parallel = 2\n[cluster]\nengine = "ray"',
        '3:19: rollout.tensor_parallel: must be 1 with cluster.engine = "ray": an actor has one GPU at most',
    ),
    (
        '[rollout]\nengine = "vllm"\ntensor_parallel = 2\n[model]\nlora_rank = 4',
        "3:19: rollout.tensor_parallel: must be 1 with model.lora_rank: adapters are not split over GPUs",
    ),
    (
        '[rollout]\nsleep = true\nengine = "mine:new_engine"\n[buffer]\nmax_staleness = 1',
        "5:17: buffer.max_staleness: must be 0 with rollout.sleep: rollouts and training take turns only then, got 1",
    ),
    *(
        (
            f"[buffer]\nmax_staleness = 0\n[rollout]\nsleep = true\nengine = {engine}",
            f"4:9: rollout.sleep: must be false with {reason}",
        )
        for engine, reason in (
            ('"transformers"', 'rollout.engine = "transformers", which computes with the worker\'s own actor'),
            ('"a:b"\n[cluster]\nengine = "ray"', 'cluster.engine = "ray": the trainer is on another machine'),
            (
                '"a:b"\n[trainer]\nkind = "external"',
                'trainer.kind = "external", which does not tell when it steps',
            ),
        )
    ),
    (
        '[rollout]\nengine = "vllm"\ntensor_parallel = 2\nsleep = true\ncache_bytes = "2GiB"\n'
        "[buffer]\nmax_staleness = 0",
        "3:19: rollout.tensor_parallel: must be 1 with rollout.sleep: turns are taken on one GPU",
    ),
    (
        '[rollout]\nengine = "vllm"\ntensor_parallel = 2\ndevices = [0, 1, 2]',
        "3:19: rollout.tensor_parallel: must divide the 3 of rollout.devices, got 2",
    ),
    (
        '[rollout]\ncache_bytes = "2GiB"',
        '2:15: rollout.cache_bytes: must be left out with rollout.engine = "transformers": only vllm reads it',
    ),
    (
        '[rollout]\nengine = "vllm"\ntop_k = 5\nlog_probs = "engine"',
        '4:13: rollout.log_probs: must be "worker" or "trainer" with rollout.top_k: the log-probs of vllm are those '
        "after it",
    ),
    (
        '[rollout]\nengine = "vllm"\ntop_p = 0.9\nlog_probs = "engine"',
        '4:13: rollout.log_probs: must be "worker" or "trainer" with rollout.top_p: the log-probs of vllm are those '
        "after it",
    ),
    (
        '[rollout]\nengine = "vllm"\nmin_p = 0.1\nlog_probs = "engine"',
        '4:13: rollout.log_probs: must be "worker" or "trainer" with rollout.min_p: the log-probs of vllm are those '
        "after it",
    ),
    (
        '[rollout]\nlog_probs = "trainer"\n[trainer]\nkind = "external"',
        '2:13: rollout.log_probs: must be "engine" or "worker" with trainer.kind = "external", which gets whole rows',
    ),
    (
        '[rollout]\nlog_probs = "trainer"\nalgorithm = "ppo"',
        '2:13: rollout.log_probs: must be "engine" or "worker" with a KL in the reward (rollout.kl_coef = 0.01): '
        "the worker scores it",
    ),
    (
        '[model]\nreference_device = "trainer"\n[trainer]\nkind = "external"',
        '2:20: model.reference_device: must be "worker" with trainer.kind = "external", which gets whole rows',
    ),
    (
        '[model]\nreference_device = "trainer"\n[rollout]\nkl_coef = 0.02',
        '2:20: model.reference_device: must be "worker" with a KL in the reward (rollout.kl_coef = 0.02): the worker '
        "scores it",
    ),
    (
        '[model]\nlora_targets = "all"',
        '2:16: model.lora_targets: must be "all-linear" or a list of names of layers, got "all"',
    ),
    (
        "[model]\nlora_targets = []",
        '2:16: model.lora_targets: must be "all-linear" or a list of names of layers, got []',
    ),
    (
        '[model]\nlora_adapter = "a"',
        "2:16: model.lora_adapter: must be left out with model.lora_rank = 0: set it to the rank of the adapter",
    ),
    (
        '[model]\nreference_device = "host"\nlora_rank = 8',
        '2:20: model.reference_device: must be "worker" or "trainer" with model.lora_rank and without model.reference: '
        "the reference is the actor without its adapters, which takes no memory",
    ),
    # No TOML, as people write it.
    (
        "[rollout]\nworkers: 4",
        "2:8: expected '=' after a key in a key/value pair: a line is key = value, [section] or # comment",
    ),
    (
        '[model]\nactor = "models/a\n[rollout]\nworkers = 1',
        '2:9: string is not closed, a " is missing at the end of the line',
    ),
    ("[rollout]\nstop_token_ids = [1, 2\n\n[trainer]\nmax_steps = 3", "2:18: list is not closed, a ] is missing"),
    ("rollout = {workers = 1", "1:11: table is not closed, a } is missing"),
    ('{"rollout": {"workers": 4}}', "1:1: invalid statement: this looks like JSON, a configuration is TOML"),
    ("[rollout]\n[trainer]\n[rollout]\n", "3:2: rollout is set twice, first in line 1"),
    ("rollout = 1\n[rollout]\nworkers = 1", "2:9: cannot overwrite a value: it was set above"),
    # Bytes.
    (b"\xff\xfe[\x00r\x00", "1:1: not UTF-8 but UTF-16, save the file as UTF-8"),
    (b"\xef\xbb\xbf[rollout]\nworkers = 0", "2:11: rollout.workers: must be at least 1, got 0"),
]


def test_each_mistake_is_shown_at_its_place(subtests: pytest.Subtests) -> None:
    for text, error in MISTAKES:
        with subtests.test(error):
            assert errors_of(text) == [f"config.toml:{error}"]


def test_a_step_may_have_a_mini_batch_for_each_row_of_all_its_batches() -> None:
    sets = ("buffer.sample_batch_size=16", "trainer.world_size=2", "trainer.gradient_accumulation_steps=2")

    assert config_load.load(None, [*sets, "trainer.mini_batches=64"], {}).config.trainer.mini_batches == 64


def test_a_line_that_is_no_toml_is_named_without_its_password() -> None:
    assert errors_of("[metrics]\nhost = http://me:secret@h/") == [
        "config.toml:2:8: invalid value: a text is in quotes, true and false are in small letters"
    ]


SET_MISTAKES = [
    ("rollout.temprature=1", "--set rollout.temprature: unknown key rollout.temprature, did you mean temperature?"),
    ("rolout.workers=1", "--set rolout.workers: unknown section rolout, did you mean rollout?"),
    ("rollout.workers=many", '--set rollout.workers: must be an integer, got "many"'),
    ("rollout.workers=", '--set rollout.workers: must be an integer, got ""'),
    ("rollout.workers", "--set rollout.workers: must be of the form section.key=value"),
    (
        "workers=1",
        "--set workers=1: must be of the form section.key=value, did you mean --set rollout.workers=1?",
    ),
    (
        "rollout.workers:4",
        "--set rollout.workers:4: must be of the form section.key=value, did you mean --set rollout.workers=4?",
    ),
    (
        "rollout__workers=4",
        "--set rollout__workers=4: must be of the form section.key=value, did you mean --set rollout.workers=4?",
    ),
    (
        "rollout/temperature 0.7",
        "--set rollout/temperature 0.7: must be of the form section.key=value, "
        "did you mean --set rollout.temperature=0.7?",
    ),
    ("daemon.hang_timeout_s=5m", '--set daemon.hang_timeout_s: must be a number, got "5m"'),
    (
        "host=http://me:se cret@h",
        "--set host=http://***@h: must be of the form section.key=value, did you mean --set metrics.host=http://***@h?",
    ),
    ("rewards.judge.url=http://h", "--set rewards.judge.url: must be rewards.NAME.OPTION, with a name of exact_answer"),
    (
        "rewards=math,mth",
        f'--set rewards: must be one of {", ".join(REWARD_NAMES)}, or of the form "module:function", got "mth"',
    ),
    ("rewards.exact_answer.weight=many", '--set rewards.exact_answer.weight: must be a number, got "many"'),
    (
        "daemon.name=http://me:secret@h",
        '--set daemon.name: must be made of a-z, 0-9 and -, got "http://***@h"',
    ),
    ("lr=3", "--set lr=3: must be of the form section.key=value, did you mean --set trainer.learning_rate=3?"),
    ("rollout.=1", "--set rollout.=1: must be of the form section.key=value"),
    (
        "rollout.a.b=1",
        f"--set rollout.a.b: unknown key rollout.a.b, {ALL_KEYS}",
    ),
    ("rollout.workers=1\nb = 2", '--set rollout.workers: must be an integer, got "1\\nb = 2"'),
    (
        "rollout.num_generations=300",
        "--set rollout.num_generations: buffer.sample_batch_size: is too small for a group of 300: "
        "256 rows a version x buffer.max_staleness 1; the least that works is 300",
    ),
]


def test_each_mistake_on_the_command_line_names_its_option(subtests: pytest.Subtests) -> None:
    for assignment, error in SET_MISTAKES:
        with subtests.test(assignment):
            assert errors_of("", assignment) == [error]


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("RLHFD_ROLLOUT__TEMPRATURE", "1", "unknown key rollout.temprature, did you mean temperature?"),
        ("RLHFD_ROLOUT__WORKERS", "1", "unknown section rolout, did you mean rollout?"),
        ("RLHFD_ROLLOUT__WORKERS", "-1", "must be at least 1, got -1"),
        ("RLHFD_DAEMON__HANG_TIMEOUT_S", "5m", 'must be a number, got "5m"'),
        ("RLHFD_ROLLOUT_WORKERS", "1", "unknown variable, did you mean RLHFD_ROLLOUT__WORKERS?"),
        ("RLHFD_TEMPERATURE", "1", "unknown variable, did you mean RLHFD_ROLLOUT__TEMPERATURE?"),
        ("RLHFD_CONFG", "x", "unknown variable, did you mean RLHFD_CONFIG?"),
        ("RLHFD_RUNTIMEDIR", "x", "unknown variable, did you mean RLHFD_RUNTIME_DIR?"),
    ],
)
def test_mistake_in_the_environment_names_its_variable(variable: str, value: str, error: str) -> None:
    assert errors_of("", environ={variable: value}) == [f"{variable}: {error}"]


def test_variables_of_others_with_our_prefix_are_left_alone() -> None:
    # Variables that Kubernetes sets in every container, for services rlhfd and rlhfd-metrics; and those of our tools.
    others = {
        "RLHFD_PORT": "tcp://10.0.0.1:9477",
        "RLHFD_SERVICE_HOST": "10.0.0.1",
        "RLHFD_METRICS_PORT": "tcp://10.0.0.1:9477",
        "RLHFD_PYTHON": "/usr/bin/python3",
        "RLHFD_TEST_SESSION": "1",
        "RLHFD_PARENT": "1",
    }

    assert not config_load.load(None, [], others).origins


def test_all_errors_come_at_once_in_the_order_of_the_file() -> None:
    text = "zzz = 1\n[rollout]\nnum_generations = 1\nworkers = 0\ntemprature = 1\n[buffer]\nlimit = -1\n"

    assert errors_of(text, "trainer.max_steps=x", "trainer.x=1", environ={"RLHFD_METRICS__PORT": "-1"}) == [
        f"config.toml:1:1: unknown key zzz, {ALL_KEYS}",
        "config.toml:3:19: rollout.num_generations: must be at least 2 with GRPO, got 1",
        "config.toml:4:11: rollout.workers: must be at least 1, got 0",
        "config.toml:5:1: unknown key rollout.temprature, did you mean temperature?",
        "config.toml:7:9: buffer.limit: must be at least 0, got -1",
        f"--set trainer.x: unknown key trainer.x, {ALL_KEYS}",
        '--set trainer.max_steps: must be an integer, got "x"',
        "RLHFD_METRICS__PORT: must be at least 0, got -1",
    ]


def test_conflict_with_a_value_that_is_wrong_by_itself_is_not_shown() -> None:
    assert errors_of("[buffer]\nsample_batch_size = 4\nmax_staleness = -1") == [
        "config.toml:3:17: buffer.max_staleness: must be at least 0, got -1"
    ]


def test_windows_line_ends_do_not_move_columns() -> None:
    assert errors_of(b'[rollout]\r\nworkers = "8"\r\n') == [
        'config.toml:2:11: rollout.workers: must be an integer, got "8"'
    ]


@pytest.mark.parametrize("depth", [400, 100_000])
def test_nesting_without_end_is_an_error(depth: int) -> None:
    (error,) = errors_of("[rollout]\nx = " + "[" * depth + "]" * depth)

    assert error in {
        "config.toml: nested too deeply",
        f"config.toml:2:1: unknown key rollout.x, {ALL_KEYS}",
    }


def test_a_number_of_more_digits_than_python_reads_is_an_error() -> None:
    digits = "1" * 5000

    (error,) = errors_of(f"[daemon]\nseed = {digits}\n")
    assert error.startswith("config.toml: Exceeds the limit (4300 digits) for integer string conversion")
    assert errors_of("", f"daemon.seed={digits}") == [f'--set daemon.seed: must be an integer, got "{digits[:59]}...']


def test_file_that_cannot_be_read_is_named_and_the_rest_checked_all_the_same() -> None:
    with pytest.raises(ConfigErrors) as raised:
        config_load.load(Path("none.toml"), ["a.b=1"], {})

    assert list(raised.value.errors) == [
        "none.toml: cannot be read: No such file or directory",
        f"--set a.b: unknown section a, the sections are {', '.join(SECTIONS)}",
    ]


class TestFiles:
    def test_missing_and_broken_model_directories_are_named_with_their_place(self, folder: Path) -> None:
        (folder / "empty").mkdir()
        (folder / "file").touch()
        text = '[model]\nactor = "none"\ncritic = "empty"\nreward = "file"\n'

        assert errors_of(text, "model.reference=nowhere", files=True) == [
            f"config.toml:2:9: model.actor: no such directory: {folder}/none (models are local, none is downloaded)",
            f"config.toml:3:10: model.critic: no config.json in {folder}/empty: not a model that transformers saved",
            f"config.toml:4:10: model.reward: no such directory: {folder}/file (models are local, none is downloaded)",
            f"--set model.reference: no such directory: {folder}/nowhere (models are local, none is downloaded)",
        ]

    def test_an_adapter_that_is_none_is_named_with_its_place(self, folder: Path) -> None:
        assert errors_of('[model]\nlora_rank = 4\nlora_adapter = "none"\n', files=True) == [
            f"config.toml:3:16: model.lora_adapter: no such directory: {folder}/none (models are local, none is "
            "downloaded)"
        ]

    def test_missing_prompts_are_named_with_their_place(self, folder: Path) -> None:
        assert errors_of('[prompts]\npath = "none"', files=True) == [
            f"config.toml:2:8: prompts.path: cannot read {folder}/none: No such file or directory"
        ]

    def test_broken_line_of_the_prompts_is_named_with_its_own_place(self, folder: Path) -> None:
        (folder / "p.jsonl").write_text('{"prompt": "a"}\n' * 6 + '["b"]\n')

        (error,) = errors_of('[prompts]\npath = "p.jsonl"', files=True)

        assert error.startswith(f"{folder}/p.jsonl:7:1: ")

    def test_empty_prompts_are_an_error(self, folder: Path) -> None:
        (folder / "p.jsonl").touch()

        (error,) = errors_of('[prompts]\npath = "p.jsonl"', files=True)

        assert error.startswith(f"{folder}/p.jsonl:1:1: no prompt in the file")

    def test_folder_below_a_file_is_an_error(self, folder: Path) -> None:
        (folder / "file").touch()

        assert errors_of('[daemon]\nruntime_dir = "file/run"', files=True) == [
            f"config.toml:2:15: daemon.runtime_dir: {folder}/file is not a directory"
        ]

    def test_one_folder_for_the_run_and_its_state_is_an_error(self, folder: Path) -> None:
        (folder / "one").mkdir()
        (folder / "link").symlink_to("one")

        assert errors_of('[daemon]\nruntime_dir = "one"\nstate_dir = "link"', files=True) == [
            f"config.toml:3:13: daemon.state_dir: {folder}/link is daemon.runtime_dir too: give them a folder each"
        ]

    def test_folder_that_cannot_be_written_is_an_error(self) -> None:
        code = (
            "import os; from pipeline.config import load; from pipeline.supervisor.preflight import problems_of_files\n"
            # Root may write everywhere, so root steps down; everything is imported by then.
            "os.getuid() or os.seteuid(65534)\n"
            "sets, environ = ['daemon.state_dir=/'], {'RLHFD_RUNTIME_DIR': '/usr/none/run'}\n"
            "try: load.load(None, sets, environ, check_files=problems_of_files)\n"
            "except load.ConfigErrors as error: print(error)"
        )

        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        uid = os.getuid() or 65534
        assert told.stdout.splitlines() == [
            f"RLHFD_RUNTIME_DIR: /usr cannot be written by uid {uid}",
            f"--set daemon.state_dir: / cannot be written by uid {uid}",
        ], told.stderr

    def test_files_of_the_http_server_are_named_with_their_place(self, folder: Path) -> None:
        (folder / "t").touch(mode=0o640)
        text = '[metrics]\ntls_cert = "c.pem"\ntls_key = "k.pem"\ntoken_file = "t"'

        assert errors_of(text, files=True) == [
            f"config.toml:2:12: metrics.tls_cert: cannot read {folder}/c.pem: No such file or directory",
            f"config.toml:3:11: metrics.tls_key: cannot read {folder}/k.pem: No such file or directory",
            f"config.toml:4:14: metrics.token_file: {folder}/t is open to other users, it must have mode 0600: "
            f"chmod 600 {folder}/t",
        ]

    def test_device_that_is_not_there_is_named_with_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

        assert errors_of("[rollout]\ndevices = [1, 7]", files=True) == [
            "config.toml:2:11: rollout.devices: device 7 is not there, 2 GPUs are visible"
        ]

    def test_more_gpus_for_a_worker_than_there_are_is_named_with_its_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

        assert errors_of('[rollout]\nengine = "vllm"\ntensor_parallel = 4', files=True) == [
            "config.toml:3:19: rollout.tensor_parallel: a worker needs 4 GPUs, 2 are there for workers"
        ]

    @pytest.mark.parametrize(
        ("sizes", "parts", "problem"),
        [
            ({}, 2, ""),
            ({}, 4, ""),
            ({}, 3, "must divide the 4 attention heads of {}, got 3"),
            (
                {"num_attention_heads": 8, "num_key_value_heads": 6}, 4,
                "must divide the 6 heads of keys and values of {}, or be a multiple, got 4",
            ),
            ({"intermediate_size": 130}, 4, "must divide the 130 values inside the MLP of {}, got 4"),
            ({"vision_config": {}}, 2, "must be 1: {} is a vision-language model, which is not split over GPUs"),
        ],
    )  # fmt: skip
    def test_a_model_that_vllm_cannot_split_is_named_at_the_number_of_gpus(
        self, folder: Path, sizes: dict[str, object], parts: int, problem: str
    ) -> None:
        model = folder / "model"
        save_shell(model)
        plain = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
        (model / "config.json").write_text(json.dumps({**plain, **sizes}))
        # Without a reward of its own, so that there is always an error.
        text = f'[model]\nactor = "model"\n[rollout]\nengine = "vllm"\ntensor_parallel = {parts}'

        found = [error for error in errors_of(text, files=True) if "tensor_parallel" in error]

        where = "config.toml:5:19: rollout.tensor_parallel: "
        assert found == ([where + problem.format(model)] if problem else [])

    def test_a_vision_language_model_is_not_quantized(self, folder: Path) -> None:
        save_shell(folder / "model", vision_config={})
        text = f'[model]\nactor = "model"\ndtype = "bfloat16"\n{QUANTIZED}'

        assert (
            f'config.toml:6:16: rollout.quantization: must be "none": {folder}/model is a vision-language model, which '
            "is not quantized"
        ) in errors_of(text, files=True)

    def test_column_that_no_row_has_is_named_at_its_key(self, folder: Path) -> None:
        (folder / "p.jsonl").write_text('{"question": "a"}\n')

        assert errors_of('[prompts]\npath = "p.jsonl"\nprompt_column = "questoin"', files=True) == [
            f'config.toml:3:17: prompts.prompt_column: no column "questoin" in {folder}/p.jsonl, which has question, '
            'did you mean "question"?'
        ]

    def test_sources_and_tools_that_are_not_there_are_named_with_their_place(self, folder: Path) -> None:
        text = '[prompts]\ntools_file = "t.json"\n[[prompts.sources]]\npath = "none"\n'

        assert errors_of(text, files=True) == [
            f"config.toml:2:14: prompts.tools_file: cannot read {folder}/t.json: No such file or directory",
            f"config.toml:3:11: prompts.sources: cannot read {folder}/none: No such file or directory",
        ]

    def test_directory_in_place_of_a_file_is_named(self, folder: Path) -> None:
        (folder / "d").mkdir()

        assert errors_of('[prompts]\npath = "d"', files=True) == [
            f"config.toml:2:8: prompts.path: no file of .parquet, .arrow, .jsonl in the folder {folder}/d"
        ]

    def test_configuration_that_is_not_there_or_a_folder_suggests_one_that_is(self, folder: Path) -> None:
        (folder / "grpo.toml").touch()
        for name, error in (
            ("grp.toml", "grp.toml: cannot be read: No such file or directory, did you mean grpo.toml?"),
            (".", ".: cannot be read: Is a directory, did you mean grpo.toml?"),
        ):
            with pytest.raises(ConfigErrors) as raised:
                config_load.load(Path(name), [], {})
            assert raised.value.errors == (error,)

    def test_files_are_checked_even_if_other_keys_are_wrong(self, folder: Path) -> None:
        assert errors_of('[model]\nactor = "none"\n[rollout]\nworkers = 0', files=True) == [
            f"config.toml:2:9: model.actor: no such directory: {folder}/none (models are local, none is downloaded)",
            "config.toml:4:11: rollout.workers: must be at least 1, got 0",
        ]

    @pytest.mark.parametrize(
        ("described", "row", "is_refused"),
        [
            ('{"vision_config": {}, "model_type": "gemma3"}', '{"prompt": "b", "images": ["b.png"]}', True),
            ('{"vision_config": {}, "model_type": "gemma3"}', '{"prompt": "b"}', False),
            ('{"vision_config": {}, "model_type": "qwen2_vl"}', '{"prompt": "b", "images": ["b.png"]}', False),
            # The model's own refusal names the prompt.
            ("{}", '{"prompt": "b", "images": ["b.png"]}', False),
        ],
    )
    def test_images_that_vllm_does_not_take_are_refused_before_the_start(
        self, folder: Path, described: str, row: str, *, is_refused: bool
    ) -> None:
        save_shell(folder / "m", **json.loads(described))
        (folder / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{row}')
        (folder / "b.png").touch()
        (folder / "c.toml").write_text(
            '[rollout]\nengine = "vllm"\n[[rewards]]\nname = "exact"\n[model]\nactor = "m"\n[prompts]\npath = "p.jsonl"'
        )

        problems = problems_of_files(config_load.load(folder / "c.toml", [], {}))

        refusal = (
            f"{folder}/c.toml:2:10: rollout.engine: vllm takes images for models of the type "
            "qwen2_vl, qwen2_5_vl, qwen3_vl, "
            f"model.actor is of the type gemma3, and {folder}/p.jsonl:2"
        )
        assert [problem.startswith(refusal) for problem in problems] == [True] * is_refused
        transformers = config_load.load(folder / "c.toml", ["rollout.engine=transformers"], {})
        assert problems_of_files(transformers) == []

    @pytest.mark.parametrize(("packing", "is_refused"), [("true", True), ("false", False)])
    def test_packed_rows_of_llama_4_are_refused_before_the_start(
        self, folder: Path, packing: str, *, is_refused: bool
    ) -> None:
        save_shell(folder / "m", model_type="llama4", text_config={"model_type": "llama4_text"})
        config = f'[model]\nactor = "m"\n[trainer]\npacking = {packing}\n[[rewards]]\nname = "exact"'

        told = [line for line in errors_of(config, files=True) if "take trainer.packing = false" in line]

        assert len(told) == is_refused and all("model.actor" in line for line in told)

    def test_no_reward_model_has_packed_rows(self, folder: Path) -> None:
        save_shell(folder / "m")
        save_shell(folder / "r", model_type="llama4", text_config={"model_type": "llama4_text"})
        table = '[[rewards]]\nname = "model"\npath = "r"'

        told = errors_of(f'[model]\nactor = "m"\n[trainer]\npacking = true\n{table}', files=True)

        assert not [line for line in told if "trainer.packing" in line]

    @pytest.mark.parametrize("key", ["actor", "reference", "critic", "reward"])
    def test_a_model_without_positions_for_the_longest_row_is_refused(self, folder: Path, key: str) -> None:
        save_shell(folder / "m")
        save_shell(folder / "short", model_type="gpt2", n_positions=32)
        (folder / "p.jsonl").write_text('{"prompt": "a"}')
        models = {"actor": "m", key: "short"}
        text = "[model]\n" + "".join(f'{name} = "{path}"\n' for name, path in models.items())
        algorithm = "ppo" if key == "critic" else "grpo"
        text += f'[prompts]\npath = "p.jsonl"\n[rollout]\nmax_length = 33\nalgorithm = "{algorithm}"\n'
        text += '[[rewards]]\nname = "exact"\n'
        (folder / "c.toml").write_text(text)

        problems = problems_of_files(config_load.load(folder / "c.toml", [], {}))

        assert len(problems) == 1 and f"model.{key}: " in problems[0]
        assert "at most 32 tokens, because its table of positions ends there (n_positions)" in problems[0]
        assert problems_of_files(config_load.load(folder / "c.toml", ["rollout.max_length=32"], {})) == []

    def test_right_files_are_accepted(self, folder: Path) -> None:
        save_shell(folder / "m")
        (folder / "p.jsonl").write_text('{"prompt": "a"}')

        sets = ["model.actor=m", "prompts.path=p.jsonl", 'rewards=["exact"]']
        config_load.load(None, sets, {}, check_files=problems_of_files)

    def test_a_model_of_its_own_gets_neither_reward_nor_prompts_of_the_embedded_task(self, folder: Path) -> None:
        for name in "mr":
            save_shell(folder / name)
        (folder / "game.py").write_text("class Game: ...\n")
        (folder / "p.jsonl").write_text('{"prompt": "a"}')
        (folder / "c.toml").write_text('[model]\nactor = "m"\n')
        needed = "must be set with a model of its own, or"
        reward = f"{folder}/c.toml:2:9: rewards: {needed} model.reward or rollout.environment"
        prompts = f"{folder}/c.toml:2:9: prompts.path: {needed} prompts.sources"
        exact = 'rewards=["pipeline.sort_digits:exact_answer"]'

        for sets, missing in (
            ([], [reward, prompts]),
            (["trainer.kind=external"], [reward, prompts]),
            (["evaluation.files=['p.jsonl']"], [reward, prompts]),
            (["prompts.path=p.jsonl"], [reward]),
            (["prompts.sources=[{path='p.jsonl'}]"], [reward]),
            ([exact], [prompts]),
            (["model.reward=r"], [prompts]),
            (["rollout.environment=game:Game"], [prompts]),
            ([exact, "prompts.path=builtin:sort-digits"], []),
            (["model.actor=builtin:sort-digits"], []),
        ):
            assert problems_of_files(config_load.load(folder / "c.toml", sets, {})) == missing, sets
