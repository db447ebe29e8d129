"""Kill anything, at any moment: nothing finished is lost, nothing is trained twice, nothing is left behind.

The proof is in the weights: with ``max_staleness = 0`` a run that was killed hundreds of times ends, bit for bit, with
the weights and the experience of an undisturbed run of as many steps.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.telemetry.evaluations import FILE_NAME, read_evaluations
from tests.chaos.campaign import (
    ENGINE_WORKER_AND_SUPERVISOR,
    ENVIRONMENTS,
    TARGETS,
    WORKER_AND_SUPERVISOR,
    Campaign,
    Target,
    trained_in,
)
from tests.daemon.test_environment import settings as turns_settings
from tests.support.daemon import SMALL, Daemon, telling_reward, total
from tests.support.endings import Ending, endings

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

KILLS, FULL_KILLS = 2, 250
"""Kills of each campaign with whole models; the full ones by ``bin/test --chaos``."""

OTHER_KILLS = 60
"""Kills of a campaign with shards, whose processes take longer to start, with refill, and with environments."""

VLLM_KILLS = 100
"""Each costs the start of an engine, some 15 s."""

REPORT_EVERY = 10
HELD_OUT, EVERY = 9, 4
DROPPED = "rlhfd_items_dropped_total"

ENDLESS = (
    *SMALL,
    "trainer.max_steps=0",
    "daemon.restart_limit=100000",
    "daemon.restart_delay_s=0.0002",
    "daemon.hang_timeout_s=15",
)
SETTINGS = (*ENDLESS, "rollout.workers=2", "rollout.max_attempts=255")
# Beside vLLM: nothing asks for an actor in the worker.
ALONE = ("rollout.log_probs=trainer", "model.reference_device=trainer")
PACKED = ("trainer.packing=true", "trainer.activation_checkpointing=true", "rollout.algorithm=ppo")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return FULL_KILLS if request.config.getoption("--chaos") else KILLS


@pytest.fixture
def targets(request: pytest.FixtureRequest) -> tuple[Target, ...]:
    """Return the targets; the short campaign has no hangs, which tests/daemon/test_hangs.py tests one by one."""
    return TARGETS if request.config.getoption("--chaos") else tuple(target for target in TARGETS if not target.hangs)


def strike(campaign: Campaign, kills: int, say) -> None:
    """Kill `kills` times; a long campaign reports its progress."""
    for count in range(1, kills + 1):
        campaign.kill()
        if count % REPORT_EVERY == 0:
            say(f"{count} of {kills} kills")


def end_in_order(campaign: Campaign, drops: str = "", may_drop: str = "") -> None:
    """Stop the daemon; its totals balance to the end and nothing of it is left.

    No row is dropped but with the reason `drops`, and some are with that; and with `may_drop`, as the last life has it.
    The rows of a shutdown that was killed once they were spooled are sealed again by the next life.
    """
    campaign.settle()
    daemon = campaign.daemon
    metrics = daemon.metrics()
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    reasons = {dict(labels)["reason"]: rows for (name, labels), rows in metrics.items() if name == DROPPED and rows}
    assert reasons.keys() <= {drops, may_drop, "spooled"}, reasons
    assert (drops in reasons) == bool(drops), reasons
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.errors[-4000:]
    assert not daemon.shm_dir.exists()
    assert daemon.leftovers() == []


def ranks_ended(errors: str, ranks: int = 1) -> list[Ending]:
    """Return the last line of each rank, in order of ranks."""
    found = endings(errors)
    assert len(found) == ranks, errors[-4000:]
    return [found[name] for name in sorted(found)]


def held_out(folder: Path, task: Path) -> tuple[str, ...]:
    """Write a file of held-out prompts; return the settings that evaluate it."""
    file = folder / "held.jsonl"
    file.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:HELD_OUT]))
    return f"evaluation.files=['{file}']", f"evaluation.every={EVERY}", "evaluation.num_generations=2"


def same_evaluations(campaign: Campaign, calm: Daemon, steps: int) -> None:
    """Compare the evaluations of two runs: each once and whole; a stop may have cut the one of the last version."""
    expected = {found.version: found for found in read_evaluations(calm.run_dir / FILE_NAME)}
    evaluated = read_evaluations(campaign.daemon.run_dir / FILE_NAME)
    assert sorted(found.version for found in evaluated)[-1] >= steps // EVERY * EVERY - EVERY
    assert [found.version for found in evaluated] == list(range(0, EVERY * len(evaluated), EVERY))
    for found in evaluated:
        other = expected[found.version]
        assert found.total.prompts == HELD_OUT
        assert (found.fingerprint, found.total, found.files) == (other.fingerprint, other.total, other.files)


def ended_after(
    campaign: Campaign, kills: int, say, ranks: int = 1, drops: str = "", may_drop: str = ""
) -> list[Ending]:
    """Kill, stop in order and report; return the last line of each rank."""
    strike(campaign, kills, say)
    end_in_order(campaign, drops, may_drop)
    say(campaign.report())
    return ranks_ended(campaign.daemon.errors, ranks)


def undisturbed(
    tmp_path: Path, task: Path | None, settings: tuple[str, ...], disturbed: list[Ending], *arguments: str
) -> Daemon:
    """Run as many steps in a folder of their own that nobody disturbs; return the daemon, which has ended."""
    folder = tmp_path / "undisturbed"
    folder.mkdir(exist_ok=True)
    telling_reward(folder)
    steps = f"trainer.max_steps={disturbed[0].steps}"
    with Daemon(folder, *settings, steps, task=task, arguments=arguments) as daemon:
        assert daemon.wait(1800.0) == 0, daemon.errors[-4000:]
    return daemon


@pytest.mark.timeout(3600)
def test_after_any_number_of_kills_the_weights_are_those_of_a_run_that_nobody_disturbed(
    tmp_path: Path, task: Path, kills: int, targets: tuple[Target, ...], say, request: pytest.FixtureRequest
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "buffer.max_staleness=0", *held_out(tmp_path, task))
    seed = request.config.getoption("--chaos-seed")
    with Campaign(tmp_path, *settings, task=task, seed=seed, targets=targets) as campaign:
        disturbed = ended_after(campaign, kills, say)
    serial = undisturbed(tmp_path, task, settings, disturbed, "--serial")

    assert disturbed == ranks_ended(serial.errors)
    same_evaluations(campaign, serial, disturbed[0].steps)


# Half the groups of 4 are flat: the reward is 1 for one response in six, which no first token decides.
RARE = """
def score(input_ids, attention_mask, *, response_start, **_):
    return float(sum(map(int, input_ids[response_start:])) % 6 == 0)
"""
# Of few prompts, so that each goes through its epochs.
SOURCES = ((40, 3.0), (7, 1.0), (19, 0.5))


def filtering(folder: Path, task: Path) -> tuple[str, ...]:
    """Write the files of a run with refill and several sources; return its settings.

    With so few rounds groups without a signal are kept now and then; rewards stay rare by the low learning rate.
    """
    for home in (folder, folder / "undisturbed"):
        home.mkdir(exist_ok=True)
        (home / "rare.py").write_text(RARE)
    lines, sources = (task / "prompts.jsonl").read_text().splitlines(keepends=True)[HELD_OUT:], []
    for count, weight in SOURCES:
        file = folder / f"prompts-{count}.jsonl"
        file.write_text("".join(lines[:count]))
        lines = lines[count:]
        sources.append(f'{{path="{file}", weight={weight}}}')
    return (
        f"model.actor={task / 'model'}", f"prompts.sources=[{', '.join(sources)}]", "rollout.max_refill=1",
        'rewards=["rare:score"]', "rollout.reward_timeout_s=0", "trainer.learning_rate=1e-5",
        *held_out(folder, task),
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_after_kills_a_run_with_refill_mixed_sources_and_evaluation_is_that_of_a_run_that_nobody_disturbed(
    tmp_path: Path, task: Path, say, request: pytest.FixtureRequest
):
    settings = (*SETTINGS, "buffer.max_staleness=0", *filtering(tmp_path, task))
    seed = 5 + request.config.getoption("--chaos-seed")
    with Campaign(tmp_path, *settings, task=None, seed=seed) as campaign:
        disturbed = ended_after(campaign, OTHER_KILLS, say, drops="filtered")
    serial = undisturbed(tmp_path, None, settings, disturbed, "--serial")

    assert disturbed == ranks_ended(serial.errors)
    same_evaluations(campaign, serial, disturbed[0].steps)
    trained = campaign.trained_before_stops + trained_in(campaign.daemon.errors)
    assert trained == 32 * disturbed[0].steps, "each step is 32 rows: none missing in it, none in two"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_after_kills_a_run_of_several_turns_is_that_of_a_run_that_nobody_disturbed(
    tmp_path: Path, task: Path, say, request: pytest.FixtureRequest
):
    # Each of both folders gets the environment.
    turns_settings(tmp_path / "undisturbed")
    settings = (*SETTINGS, *turns_settings(tmp_path), "trainer.max_steps=0")
    seed = 6 + request.config.getoption("--chaos-seed")
    with Campaign(tmp_path, *settings, task=task, seed=seed, targets=(*TARGETS, *ENVIRONMENTS)) as campaign:
        disturbed = ended_after(campaign, OTHER_KILLS, say)

    assert disturbed == ranks_ended(undisturbed(tmp_path, task, settings, disturbed, "--serial").errors)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_after_any_number_of_kills_each_of_two_ranks_has_the_digest_of_a_run_that_nobody_disturbed(
    tmp_path: Path, task: Path, kills: int, say, request: pytest.FixtureRequest
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "trainer.world_size=2", "buffer.max_staleness=0")
    with Campaign(tmp_path, *settings, task=task, seed=2 + request.config.getoption("--chaos-seed")) as campaign:
        disturbed = ended_after(campaign, kills, say, ranks=2)

    assert disturbed == ranks_ended(undisturbed(tmp_path, task, settings, disturbed).errors, 2)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ranks", "more"),
    # With PPO actor and critic together are large enough for a thread that publishes.
    [(2, ()), (2, PACKED), (4, ("rollout.algorithm=ppo", "trainer.keep_state_every=3"))],
    ids=["padded", "packed", "four"],
)
def test_after_kills_ranks_that_hold_shards_have_the_digests_of_a_run_that_nobody_disturbed(
    tmp_path: Path, task: Path, say, request: pytest.FixtureRequest, ranks: int, more: tuple[str, ...]
):
    settings = (
        *SETTINGS, *telling_reward(tmp_path), f"trainer.world_size={ranks}", 'trainer.sharding="full"',
        "trainer.save_every=8", "buffer.max_staleness=0", *more,
    )  # fmt: skip
    with Campaign(tmp_path, *settings, task=task, seed=3 + request.config.getoption("--chaos-seed")) as campaign:
        # A killed rank takes steps back of which there is no state.
        disturbed = ended_after(campaign, OTHER_KILLS, say, ranks=ranks, may_drop="rolled_back" if ranks == 4 else "")

    assert disturbed == ranks_ended(undisturbed(tmp_path, task, settings, disturbed).errors, ranks)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_ranks_ahead_of_their_workers_train_every_row_exactly_once(
    tmp_path: Path, task: Path, kills: int, say, request: pytest.FixtureRequest
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "trainer.world_size=2", "buffer.max_staleness=2")
    with Campaign(tmp_path, *settings, task=task, seed=1 + request.config.getoption("--chaos-seed")) as campaign:
        strike(campaign, kills, say)
        end_in_order(campaign)
    say(campaign.report())

    steps = ranks_ended(campaign.daemon.errors, 2)[0].steps
    trained = campaign.trained_before_stops + trained_in(campaign.daemon.errors)
    assert trained == 64 * steps, "each step is 64 rows: none missing in it, none in two"


MANY_TICKETS = (*ENDLESS, "rollout.workers=1", "rollout.batch_size=1", "rollout.tickets_ahead=16")
"""A worker with many small tickets in hand, each of one prompt, and few attempts: no ticket is at fault for a kill."""


@pytest.mark.variant
@pytest.mark.timeout(7200)
def test_kills_of_a_worker_with_many_tickets_and_of_its_supervisor_change_no_bit(
    tmp_path: Path, task: Path, kills: int, say, request: pytest.FixtureRequest
):
    settings = (*MANY_TICKETS, *telling_reward(tmp_path), "buffer.max_staleness=0")
    seed = 3 + request.config.getoption("--chaos-seed")
    with Campaign(tmp_path, *settings, task=task, seed=seed, targets=WORKER_AND_SUPERVISOR) as campaign:
        disturbed = ended_after(campaign, kills, say)

    assert disturbed == ranks_ended(undisturbed(tmp_path, task, settings, disturbed, "--serial").errors)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("alone", [(), ALONE], ids=["beside the worker's actor", "the engine alone has the actor"])
def test_kills_of_vllm_its_worker_and_the_supervisor_lose_no_row_and_train_none_twice(
    tmp_path: Path, task: Path, say, request: pytest.FixtureRequest, alone: tuple[str, ...]
):
    settings = (*MANY_TICKETS, *telling_reward(tmp_path), "rollout.engine=vllm", "daemon.hang_timeout_s=120", *alone)
    seed = 4 + request.config.getoption("--chaos-seed")
    targets = ENGINE_WORKER_AND_SUPERVISOR
    with Campaign(tmp_path, *settings, task=task, seed=seed, targets=targets) as campaign:
        strike(campaign, VLLM_KILLS, say)
        end_in_order(campaign)
    say(campaign.report())

    steps = ranks_ended(campaign.daemon.errors)[0].steps
    trained = campaign.trained_before_stops + trained_in(campaign.daemon.errors)
    assert trained == 32 * steps, "each step is 32 rows: none missing in it, none in two"
