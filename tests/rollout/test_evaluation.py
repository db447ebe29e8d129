"""Held-out prompts through the real models: sampled and scored as a rollout would be, each prompt once."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pipeline.cli.evaluate import evaluate as eval_command
from pipeline.config.prompts import PromptsConfig
from pipeline.config.rewards import OwnReward
from pipeline.config.schema import Config
from pipeline.config.user_modules import FOLDER_VARIABLE
from pipeline.errors import ConfigError
from pipeline.models.loading import load_actor, load_tokenizer
from pipeline.prompts.check import check
from pipeline.prompts.source import PromptSource
from pipeline.rollout.evaluation import alone
from pipeline.rollout.evaluation.roller import EvaluationRoller
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.vllm import engine as vllm
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.loader import load_roller
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.roller import LocalRoller
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.storage import sealed_json
from pipeline.supervisor import placement
from pipeline.trainer import setup
from tests.support import tiny_vision
from tests.support.daemon import EXACT, telling_reward

CPU = torch.device("cpu")
PROMPTS = ("7302>", "918>", "44012>", "5566>", "31>", "87>", "640>")

BROKEN = """
class Broken:
    def reset(self, prompt, answer, columns): pass
    def step(self, response): raise ValueError("no such tool")
"""

Load = Callable[..., tuple[LocalRoller, Config]]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    rows = ({"prompt": prompt, "answer": "".join(sorted(prompt[:-1]))} for prompt in PROMPTS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(task: Path, held_out: Path, **evaluation: Any) -> dict[str, Any]:
    return {
        "model": {"actor": str(task / "model")},
        "prompts": {"path": str(task / "prompts.jsonl")},
        "rollout": {
            "num_generations": 4, "max_length": 16, "temperature": 0.9, "reward_timeout_s": 0.0,
        },
        "rewards": ["telling:score"],
        "trainer": {"kl_coef": 0.0},
        "evaluation": {"files": [str(held_out)], "num_generations": 3, "pass_reward": 2.0, "batch_size": 3,
                       **evaluation},
    }  # fmt: skip


@pytest.fixture
def load(task: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    telling_reward(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[LocalRoller] = []

    def loaded(**evaluation: Any) -> tuple[LocalRoller, Config]:
        config, telemetry = Config.model_validate(values(task, held_out, **evaluation)), NodeTelemetry()
        tokenizer = load_tokenizer(config.model.actor)
        made.append(load_roller(config, tokenizer, telemetry, texts=True, device=CPU))
        return made[-1], config

    yield loaded
    for roller in made:
        roller.close()


def test_the_results_of_held_out_prompts_are_those_of_a_rollout_of_them(load: Load, held_out: Path) -> None:
    roller, config = load(num_generations=4)
    evaluator = roller.of(0)
    assert isinstance(evaluator, EvaluationRoller)
    # A roller of training, on the same prompts and with the same seed.
    reference = LocalRoller(
        evaluator.maker, PromptSource(held_out, config.daemon.seed), evaluator.tokenizer, evaluator.weights,
        seed=evaluator.seed, lengths=evaluator.lengths, vocabulary=evaluator.vocabulary, template="auto",
        sampling=evaluator.sampling,
    )  # fmt: skip
    experience = reference.roll(0, 3).rows.padded()
    assert experience is not None and experience.reward is not None and experience.action_mask is not None

    rolled = roller.of(0).roll(0, 3)

    rewards, lengths = experience.reward.double().reshape(3, 4), experience.action_mask.sum(1).reshape(3, 4)
    assert rolled.rows is None and rolled.prompts_failed == 0
    assert [result.position for result in rolled.results] == [0, 1, 2]
    for at, result in enumerate(rolled.results):
        assert result.responses == 4 and result.right == int((rewards[at] >= 2.0).sum())
        assert result.reward == pytest.approx(float(rewards[at].mean()))
        assert result.tokens == float(lengths[at].double().mean())
    assert len({result.reward for result in rolled.results}) > 1, "responses differ"
    reference.source.close()


def test_every_held_out_prompt_is_evaluated_once_with_sampling_of_its_own(load: Load, held_out: Path) -> None:
    roller, config = load()
    plan = EvaluationPlan.of(config)
    assert plan is not None

    found = [roller.of(file).roll(position, prompts) for file, position, prompts in plan.tickets()]

    results = [result for rolled in found for result in rolled.results]
    assert sorted(result.position for result in results) == list(range(7))
    assert roller.of(0).sampling == roller.sampling and roller.sampling.temperature == 0.9
    cold, _ = load(temperature=0.0, num_generations=1, max_new_tokens=2)
    assert not cold.of(0).sampling.do_sample and cold.sampling.do_sample
    own, _ = load(temperature=0.5, top_p=0.75, top_k=3, min_p=0.25)
    assert own.of(0).sampling == dataclasses.replace(roller.sampling, temperature=0.5, top_p=0.75, top_k=3, min_p=0.25)
    short = cold.of(0).roll(0, 7).results
    assert max(result.tokens for result in short) <= 2 < max(result.tokens for result in results)
    assert cold.of(0).roll(0, 7).results == short


def test_greedy_responses_do_not_depend_on_the_seed(load: Load) -> None:
    first, _ = load(temperature=0.0, num_generations=1)
    second, _ = load(temperature=0.0, num_generations=1)
    second.of(0).seed += 1

    assert first.of(0).roll(0, 7).results == second.of(0).roll(0, 7).results


def test_a_prompt_with_a_row_without_a_reward_has_no_result(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    roller, _ = load()
    maker = roller.of(0).maker
    scored = maker.reward_model  # type: ignore[attr-defined]

    def broken(**row: Any) -> torch.Tensor:
        scores: torch.Tensor = scored(**row)
        scores[4] = math.nan
        return scores

    whole = roller.of(0).roll(0, 3)
    monkeypatch.setattr(maker, "reward_model", broken)

    rolled = roller.of(0).roll(0, 3)

    assert [result.position for result in rolled.results] == [0, 2] and rolled.prompts_failed == 1
    assert rolled.results == (whole.results[0], whole.results[2])


def test_a_model_alone_is_evaluated_as_in_a_run(load: Load) -> None:
    roller, config = load()
    plan = EvaluationPlan.of(config)
    assert plan is not None
    in_run = [roller.of(file).roll(position, prompts) for file, position, prompts in plan.tickets()]
    seen = []

    found = alone.evaluate(config, on_progress=lambda done, prompts: seen.append((done, prompts)))

    expected = plan.evaluation(-1, "", [[result for rolled in in_run for result in rolled.results]])
    assert (found.total, found.files, found.plan) == (expected.total, expected.files, plan.digest)
    assert seen == [(3, 7), (6, 7), (7, 7)]


PENALIZED = """def right(ids, mask, **_):
    return 0.7
def length(ids, mask, *, response_start, response_end, **_):
    return -0.001 * (response_end - response_start)
"""


def test_the_function_that_counts_is_compared_alone_and_a_bound_that_nothing_reaches_is_said(
    task: Path, tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "penalized.py").write_text(PENALIZED)
    monkeypatch.syspath_prepend(tmp_path)

    def evaluated(**evaluation: Any) -> tuple[Any, list[str]]:
        given = values(task, held_out, pass_reward=0.7, **evaluation)
        given["rewards"] = ["penalized:length", "penalized:right"]
        caplog.clear()
        found = alone.evaluate(Config.model_validate(given))
        said = [record.getMessage() for record in caplog.records]
        return found, [line for line in said if "no response is right" in line]

    whole, said = evaluated()
    part, silence = evaluated(pass_function="penalized:right")

    assert (whole.total.pass_at_1, part.total.pass_at_1) == (0.0, 1.0)
    assert whole.total.reward_mean == part.total.reward_mean and whole.plan != part.plan
    assert len(said) == 1 and "largest=0.69" in said[0] and "pass_reward=0.7 of=the whole reward" in said[0]
    assert silence == []


def test_a_model_of_which_no_prompt_has_a_result_is_an_error(load: Load, tmp_path: Path) -> None:
    _, config = load()
    (tmp_path / "failing.py").write_text("def score(*row, **others):\n    raise ValueError('no')\n")

    with pytest.raises(ConfigError, match=r"no prompt has a result: failing:score raised ValueError"):
        alone.evaluate(config.model_copy(update={"rewards": [OwnReward(name="failing:score")]}))


def test_an_environment_that_fails_is_named_where_no_prompt_has_a_result(
    load: Load, monkeypatch, tmp_path: Path
) -> None:
    _, config = load()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "broken.py").write_text(BROKEN)
    rollout = config.rollout.model_copy(update={"environment": "broken:Broken"})

    with pytest.raises(ConfigError, match=r"no prompt has a result: rollout\.environment: ValueError: no such tool"):
        alone.evaluate(config.model_copy(update={"rollout": rollout, "rewards": []}))


def test_engine_and_environments_are_closed_after_an_error_of_the_load(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = load()
    closed = []
    pool = SimpleNamespace(wait_ready=lambda: None, close=lambda: closed.append("environments"))
    engine = SimpleNamespace(close=lambda: closed.append("engine"))
    monkeypatch.setattr("pipeline.rollout.loader.EnvironmentPool", lambda *_, **__: pool)
    monkeypatch.setattr("pipeline.rollout.loader.load_engine", lambda *_: engine)

    def fails(*_: Any, **__: Any) -> Any:
        raise ConfigError("evaluation.files: no such file")

    monkeypatch.setattr("pipeline.rollout.loader.PromptSource", fails)
    rollout = config.rollout.model_copy(update={"environment": "quiet:Quiet"})

    with pytest.raises(ConfigError, match="no such file"):
        alone.evaluate(config.model_copy(update={"rollout": rollout, "rewards": []}))

    assert sorted(closed) == ["engine", "environments"]


def test_with_vllm_a_model_of_a_lora_run_is_evaluated_without_adapters(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = load()
    expected, started = alone.evaluate(config), []

    def started_engine(settings: wire.Settings, **_: Any) -> BlockingEngine:
        started.append(settings.lora)
        model = load_actor(config.model.actor, dtype=config.model.dtype, device=CPU)
        return BlockingEngine(TransformersGenerator(model))

    process = lambda settings, **_: SimpleNamespace(settings=settings, close=lambda: None)  # noqa: E731
    monkeypatch.setattr(vllm, "refuse_unsuitable", lambda: None)
    monkeypatch.setattr(vllm, "EngineProcess", process)
    monkeypatch.setattr(vllm, "VllmEngine", started_engine)

    found = alone.evaluate(config.changed("rollout", engine="vllm").changed("model", lora_rank=4))

    assert started == [None] and found.total == expected.total


def test_an_environment_for_a_model_that_takes_images_is_refused(load: Load, tmp_path: Path) -> None:
    _, config = load()
    tiny_vision.save(tmp_path / "vision")
    changes = {
        "model": config.model.model_copy(update={"actor": str(tmp_path / "vision")}),
        "rollout": config.rollout.model_copy(update={"environment": "broken:Broken"}),
    }

    with pytest.raises(ConfigError, match=r"rollout\.environment: model\.actor takes images"):
        alone.evaluate(config.model_copy(update=changes))


def test_the_command_shows_a_table_or_json(
    task: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "21>", "answer": "12"}\n')
    sets = ["--set", "rollout.max_length=16", "--set", "evaluation.num_generations=2", "--set", "evaluation.pass_k=2"]
    sets += ["--set", EXACT]
    arguments = [str(held_out), str(other), "--model", str(task / "model"), *sets]

    before = {*tmp_path.iterdir()}
    table, as_json = (CliRunner().invoke(eval_command, [*arguments, *more]) for more in ([], ["--json"]))

    assert table.exit_code == as_json.exit_code == 0, (table.output, as_json.output)
    lines = table.stdout.splitlines()
    assert lines[0].split() == ["file", "prompts", "failed", "pass@1", "pass@2", "reward", "length", "cut"]
    assert [line.split()[:3] for line in lines[1:]] == [["held", "7", "0"], ["other", "1", "0"], ["all", "8", "0"]]
    total = json.loads(as_json.stdout)["total"]
    assert lines[3].split()[3] == f"{total['pass_at_1']:.4f}"
    of_one = CliRunner().invoke(eval_command, [*arguments, "--set", "evaluation.pass_k=1"])
    assert of_one.stdout.splitlines()[0].split() == ["file", "prompts", "failed", "pass@1", "reward", "length", "cut"]
    assert of_one.stdout.splitlines()[3].split()[3] == lines[3].split()[3]
    assert {*tmp_path.iterdir()} == before, "no embedded model was made for another one"


COIN = """def score(input_ids, attention_mask, *, response_start, **_):
    return float(input_ids[response_start] % 2)
"""


def test_the_command_writes_the_pass_rate_of_each_prompt_for_a_curriculum(
    task: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)
    sets = ["--set", "rollout.max_length=16", "--set", "evaluation.num_generations=2", "--set", "evaluation.pass_k=2"]
    module = f"coin_{tmp_path.name.replace('-', '_')}"  # modules stay loaded in this process
    (tmp_path / f"{module}.py").write_text(COIN)
    sets += ["--set", f'rewards=["{module}:score"]', "--set", "rollout.reward_timeout_s=0"]
    arguments = [str(held_out), "--model", str(task / "model"), *sets, "--json"]

    done = CliRunner().invoke(eval_command, [*arguments, "--pass-rates", "rated.jsonl"])
    two = CliRunner().invoke(eval_command, [str(held_out), *arguments, "--pass-rates", "two.jsonl"])
    nowhere = CliRunner().invoke(eval_command, [*arguments, "--pass-rates", "no/rated.jsonl"])

    assert done.exit_code == 0, done.output
    rated = [json.loads(line) for line in Path("rated.jsonl").read_text().splitlines()]
    given = [json.loads(line) for line in held_out.read_text().splitlines()]
    assert [{**row, "pass_rate": None} for row in rated] == [{**row, "pass_rate": None} for row in given]
    rates = [row["pass_rate"] for row in rated]
    assert sum(rates) / len(rates) == pytest.approx(json.loads(done.stdout)["total"]["pass_at_1"])
    assert 0 < sum(rates) < len(rates), "prompts that pass and prompts that do not"
    assert 'rows with the column "pass_rate" in rated.jsonl' in done.stderr
    prompts = PromptsConfig(path="rated.jsonl", pass_rate_column="pass_rate", curriculum="easy_first")
    assert check(prompts) == len(given)
    assert two.exit_code == 2 and "--pass-rates needs one file of prompts" in two.output
    assert isinstance(nowhere.exception, ConfigError) and "cannot write no/rated.jsonl" in str(nowhere.exception)


def test_pass_rates_that_cannot_be_written_are_refused_before_the_evaluation(
    task: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)
    evaluated: list[Any] = []
    monkeypatch.setattr("pipeline.rollout.evaluation.alone.evaluate", lambda *given, **_: evaluated.append(given))
    before = held_out.read_bytes()
    arguments = ["held.jsonl", "--model", str(task / "model"), "--set", "rollout.max_length=16"]
    module = f"rated_{tmp_path.name.replace('-', '_')}"  # modules stay loaded in this process
    (tmp_path / f"{module}.py").write_text(COIN)
    arguments += ["--set", f'rewards=["{module}:score"]']

    for path, message in (
        ("no/rated.jsonl", "--pass-rates: cannot write no/rated.jsonl: No such file or directory"),
        ("held.jsonl", "--pass-rates: held.jsonl is the file of the prompts itself, give a new one"),
    ):
        refused = CliRunner().invoke(eval_command, [*arguments, "--pass-rates", path])

        assert isinstance(refused.exception, ConfigError) and str(refused.exception) == message
    assert not evaluated and held_out.read_bytes() == before


def test_reward_functions_beside_the_configuration_are_found_from_another_folder(
    task: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"held_{tmp_path.name.replace('-', '_')}"  # modules stay loaded in this process
    (tmp_path / f"{module}.py").write_text("def score(*row, **others):\n    return 1.0\n")
    (tmp_path / "run.toml").write_text(
        f"[model]\nactor = '{task / 'model'}'\n[prompts]\npath = '{task / 'prompts.jsonl'}'\n"
        f"[rollout]\nmax_length = 12\n[[rewards]]\nname = '{module}:score'\n"
        f"[evaluation]\nfiles = ['{held_out}']\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(FOLDER_VARIABLE, "")

    found = CliRunner().invoke(eval_command, ["--config", "../run.toml", "--json"])

    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["total"]["pass_at_1"] == 1.0


@pytest.fixture
def checkpoint(task: Path, tmp_path: Path) -> Path:
    """A checkpoint of an embedded run; it is a model of 128 positions."""
    model = shutil.copytree(task / "model", tmp_path / "step-000004")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 128}))
    run = Config.model_validate({"evaluation": {"num_generations": 2}}).model_dump(mode="json")
    note = CheckpointNote("", 4, 4, 0, complete=True, digest="", fingerprint="", config=run)
    (model / "trainer_state.json").write_bytes(sealed_json.encode(note))
    return model


@pytest.mark.parametrize(
    ("has_note", "sets", "length", "dtype"),
    [
        (True, (), 24, "float32"),
        (True, ("rollout.max_new_tokens=8", "rollout.max_prompt_length=24"), 32, "float32"),
        (True, ("model.dtype=bfloat16",), 24, "bfloat16"),
        (False, (EXACT,), 128, "bfloat16"),
    ],
)
def test_a_checkpoint_has_the_defaults_of_its_run_and_any_other_model_its_own(
    checkpoint: Path,
    held_out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_note: bool,
    sets: tuple[str, ...],
    length: int,
    dtype: str,
) -> None:
    if not has_note:
        (checkpoint / "trainer_state.json").unlink()
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)
    # The embedded run has no defaults that follow from GPUs.
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["0"])
    monkeypatch.setattr(setup, "prepare", lambda folder: None)
    seen: list[Config] = []

    def evaluated(config: Config, **_: Any) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(alone, "evaluate", evaluated)
    run = Config.model_validate({"evaluation": {"files": [str(held_out)], "num_generations": 2}})
    words = [word for one in ("evaluation.num_generations=2", *sets) for word in ("--set", one)]

    CliRunner().invoke(eval_command, [str(held_out), "--model", "step-000004", *words])

    assert [(one.model.actor, one.lengths.row, one.model.dtype) for one in seen] == [(str(checkpoint), length, dtype)]
    plans = [EvaluationPlan.of(one) for one in (run, *seen)]
    assert (plans[0] == plans[1]) is (length == 24)


@pytest.mark.parametrize("run", [{}, {"rewards": ["exact"]}, {"model": {"reward": "/models/reward"}}])
def test_a_model_is_scored_by_the_embedded_tasks_reward_only_if_its_run_was(
    checkpoint: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any]
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)
    note = checkpoint / "trainer_state.json"
    written = {**json.loads(note.read_text()), "config": Config.model_validate(run).model_dump(mode="json")}
    note.write_text(json.dumps(written)) if run else note.unlink()

    found = CliRunner().invoke(eval_command, [str(held_out), "--model", "step-000004"])

    assert isinstance(found.exception, ConfigError)
    (line,) = str(found.exception).splitlines()
    assert line.startswith("--set model.actor: rewards: must be set with a model of its own, or ")


def test_a_conflict_with_the_lengths_of_the_checkpoints_run_is_named(
    checkpoint: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)

    found = CliRunner().invoke(
        eval_command, [str(held_out), "--model", "step-000004", "--set", "evaluation.max_new_tokens=100"]
    )

    assert isinstance(found.exception, ConfigError)
    assert "evaluation.max_new_tokens: must be at most the 23 tokens" in str(found.exception)


@pytest.mark.parametrize("given", [True, False])
def test_a_model_alone_computes_its_logits_as_a_worker_does(
    load: Load, monkeypatch: pytest.MonkeyPatch, *, given: bool
) -> None:
    _, config = load()
    config = config.model_copy(update={"model": config.model.model_copy(
        update={"dtype": "bfloat16", "float32_logits": given}
    )})  # fmt: skip
    dtypes = set()
    roll = LocalRoller.roll

    def watched(self: LocalRoller, *arguments: Any, **keywords: Any) -> Any:
        dtypes.add(self.maker.actor(torch.ones(1, 2, dtype=torch.long)).logits.dtype)
        return roll(self, *arguments, **keywords)

    monkeypatch.setattr(LocalRoller, "roll", watched)

    alone.evaluate(config)

    assert dtypes == {torch.float32 if given else torch.bfloat16}


def test_without_held_out_prompts_the_command_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHFD_CONFIG", raising=False)

    refused = CliRunner().invoke(eval_command, [])

    assert refused.exit_code == 2 and "give FILES of held-out prompts" in refused.output
