"""Batches copied out of the arena, the next one while the current one is trained."""

import threading

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.experience import codec
from pipeline.runtime.messages import ExtentRows, Lease
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.trainer import prefetch
from pipeline.trainer.prefetch import Gathering, Prefetcher
from pipeline.trainer.state import digest_after
from tests.support.experiences import made_up

LAYOUT = LedgerLayout(extents=16, rows_per_extent=4)
CPU = torch.device("cpu")


class Shelf:
    """An arena with one extent for each lease."""

    def __init__(self, folder):
        Arena.create(folder / "arena", payload_bytes=1 << 20, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
        self.arena = Arena(folder / "arena")
        self.made = {}

    def lease(self, number):
        offset = number << 14
        self.made[number] = made_up(rows=4, seed=number)
        encoded = codec.encode(self.made[number], self.arena.extent(offset, 1 << 14))
        part = ExtentRows(offset, encoded.nbytes, encoded.checksum, 3, number, [0, 1, 2, 3])
        return Lease(1, number, 3, [part])

    def damage(self, number):
        self.arena.extent(number << 14, 1 << 14)[200:400] = bytes(200)


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.arena.close()


def test_what_was_begun_is_copied_before_it_is_taken(shelf):
    prefetcher, lease = Prefetcher(shelf.arena, Gathering(ahead=True)), shelf.lease(0)
    prefetcher.begin(lease, CPU)
    prefetcher._next.made.result()
    shelf.damage(0)

    fetched = prefetcher.take(lease, CPU)

    assert torch.equal(fetched.content.tensor("reward"), shelf.made[0].reward)
    assert fetched.content.columns["info.policy_version"].tolist() == [3] * 4
    assert prefetcher.take(lease, CPU).damaged.keys() == {0}, "and the extent was no longer whole"
    prefetcher.close()


def test_a_batch_is_never_taken_for_another(shelf):
    prefetcher, leases = Prefetcher(shelf.arena, Gathering(ahead=True)), [shelf.lease(number) for number in range(2)]
    prefetcher.begin(leases[0], CPU)

    fetched = prefetcher.take(leases[1], CPU)

    assert torch.equal(fetched.content.tensor("reward"), shelf.made[1].reward)
    prefetcher.begin(leases[0], CPU)
    assert prefetcher.take(leases[0], torch.device("meta")).content.moved["reward"].device.type == "meta"
    prefetcher.close()


def test_damage_that_is_found_ahead_is_told_when_the_batch_is_taken(shelf):
    prefetcher, lease = Prefetcher(shelf.arena, Gathering(ahead=True)), shelf.lease(0)
    shelf.damage(0)
    prefetcher.begin(lease, CPU)

    fetched = prefetcher.take(lease, CPU)

    assert fetched.content is None and "checksum" in fetched.damaged[0]
    prefetcher.close()


@pytest.mark.parametrize("ending", ["discard", "close"])
def test_once_it_is_discarded_nothing_of_the_arena_is_read(shelf, monkeypatch, ending):
    prefetcher, lease = Prefetcher(shelf.arena, Gathering(ahead=True)), shelf.lease(0)
    go_on, reading, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        reading.set()
        go_on.wait(10.0)
        return codec.gather(*args, **kwargs)

    monkeypatch.setattr(prefetch, "codec", type("Slow", (), {"ExtentReader": codec.ExtentReader, "gather": slow}))
    prefetcher.begin(lease, CPU)
    assert reading.wait(10.0)
    end = threading.Thread(target=lambda: (getattr(prefetcher, ending)(), ended.set()))
    end.start()

    assert not ended.wait(0.2), "a copy is under way"
    go_on.set()
    assert ended.wait(10.0)
    end.join()
    prefetcher.close()


@pytest.mark.parametrize("begun", [None, False, True])
def test_a_padded_batch_has_the_same_rows(shelf, begun):
    prefetcher, lease = Prefetcher(shelf.arena), shelf.lease(0)
    rows = prefetcher.take(lease, CPU).content
    if begun is not None:
        prefetcher.begin(lease, CPU, padded=begun)

    batch = prefetcher.take(lease, CPU, padded=True).content

    expected = rows.padded()
    assert torch.equal(batch.sequences, expected.sequences) and torch.equal(batch.values, expected.values)
    assert batch.info.keys() == expected.info.keys()
    assert torch.equal(batch.info["policy_version"], expected.info["policy_version"])
    moved = prefetcher.take(lease, torch.device("meta"), padded=True).content
    assert moved.sequences.device.type == moved.info["policy_version"].device.type == "meta"
    prefetcher.close()


def test_by_default_a_cpu_is_not_given_two_things_to_do(shelf):
    assert not Prefetcher(shelf.arena).wants_next(CPU)
    assert Prefetcher(shelf.arena).wants_next(torch.device("cuda", 0))


@pytest.mark.gpu
def test_on_a_card_batches_are_whole_while_it_computes(shelf):
    device = torch.device("cuda", 0)
    prefetcher, leases = Prefetcher(shelf.arena), [shelf.lease(number) for number in range(12)]
    busy = torch.randn(2048, 2048, device=device)
    held = []
    for place, lease in enumerate(leases):
        fetched = prefetcher.take(lease, device)
        for _ in range(8):
            busy = busy @ busy / 2048
        held.append(fetched.content.moved["reward"] + 0 * busy[0, 0])
        if place + 1 < len(leases):
            prefetcher.begin(leases[place + 1], device)
        del fetched
    prefetcher.close()

    for number, reward in enumerate(held):
        assert torch.equal(reward.cpu(), shelf.made[number].reward)


def test_a_batch_for_another_device_keeps_its_rows_on_the_cpu_for_the_digest(shelf):
    prefetcher, lease = Prefetcher(shelf.arena), shelf.lease(0)

    moved, stayed = prefetcher.take(lease, torch.device("meta")), prefetcher.take(lease, CPU)

    assert {tensor.device.type for tensor in moved.content.moved.values()} == {"meta"}
    assert moved.content.moved.keys() == moved.content.columns.keys()
    assert digest_after(7, [moved.content]) == digest_after(7, [stayed.content])
    assert stayed.content.moved is None
    prefetcher.close()


FIELDS = {
    "reference": (
        "needs_reference", "base_action_log_probs",
        'of the reference model: no KL weight was above 0, or model.reference_device was "trainer"',
    ),
    "log-probs": ("needs_log_probs", "action_log_probs", 'no log-probs of the policy: rollout.log_probs was "trainer"'),
    "cut": ("needs_cut", "info.cut", "do not say whether responses were cut"),
}  # fmt: skip


def lease_of_two_times(shelf, field, rows_have_it):
    """Return a lease of extents of which each has a field or not, and their rows."""
    parts, rows = [], []
    for number, has_it in enumerate(rows_have_it):
        made = made_up(rows=4, seed=number)
        if field == "info.cut" and has_it:
            made.info["cut"] = torch.zeros(4, dtype=torch.bool)
        elif field == "behaviour_log_probs" and has_it:
            made.behaviour_log_probs = made.action_log_probs.clone()
        elif not field.startswith("info.") and not has_it:
            setattr(made, field, None)
        offset = number << 14
        encoded = codec.encode(made, shelf.arena.extent(offset, 1 << 14))
        parts.append(ExtentRows(offset, encoded.nbytes, encoded.checksum, 3, number, [0, 1, 2, 3]))
        rows.append(made)
    return Lease(1, 0, 3, parts), rows


@pytest.mark.parametrize(("needed", "rows_have_it", "refused"), [
    (True, [True, True], set()), (True, [True, False], {1}), (True, [False, False], {0, 1}),
    (False, [True, True], set()), (False, [True, False], set()), (False, [False, False], set()),
])  # fmt: skip
@pytest.mark.parametrize("name", ["reference", "log-probs", "cut"])
def test_rows_without_a_field_are_refused_if_the_trainer_needs_it_and_used_if_not(
    shelf, name, needed, rows_have_it, refused
):
    key, field, told = FIELDS[name]
    lease, rows = lease_of_two_times(shelf, field, rows_have_it)
    prefetcher = Prefetcher(shelf.arena, Gathering(**{key: needed}))

    fetched = prefetcher.take(lease, CPU)

    assert fetched.damaged.keys() == refused
    assert all(told in reason for reason in fetched.damaged.values())
    assert (fetched.content is None) == bool(refused)
    if fetched.content is not None:
        batch = fetched.content.padded()
        assert torch.equal(batch.reward, torch.cat([made.reward for made in rows]))
        has_field = "cut" in batch.info if name == "cut" else getattr(batch, field) is not None
        assert has_field == all(rows_have_it), "it is left out where a row lacks it"
    prefetcher.close()


@pytest.mark.parametrize(
    ("rows_have_it", "refused"),
    # As after a change from vLLM to the default engine, and back.
    [([True, False], {0}), ([False, True], {0}), ([True, False, False], {0}), ([True, True], set()), ([False], set())],
)
def test_rows_with_and_without_log_probs_of_the_engine_are_not_mixed_and_the_newest_are_kept(
    shelf, rows_have_it, refused
):
    lease, _ = lease_of_two_times(shelf, "behaviour_log_probs", rows_have_it)
    prefetcher = Prefetcher(shelf.arena)

    fetched = prefetcher.take(lease, CPU)

    assert fetched.damaged.keys() == refused
    assert all("behaviour_log_probs in another form" in reason for reason in fetched.damaged.values())
    assert (fetched.content is None) == bool(refused)
    prefetcher.close()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["reward.short", "reward_numbers", "turns"])
def test_rows_of_before_a_change_of_the_rewards_are_trained_beside_later_ones(shelf, name, padded):
    lease, rows = lease_of_two_times(shelf, "info.", [True, True])
    later = made_up(rows=4, seed=2)
    later.info[name] = torch.ones(4, 3) if name == "reward_numbers" else torch.ones(4)
    encoded = codec.encode(later, shelf.arena.extent(2 << 14, 1 << 14))
    lease.parts.append(ExtentRows(2 << 14, encoded.nbytes, encoded.checksum, 3, 2, [0, 1, 2, 3]))
    prefetcher = Prefetcher(shelf.arena)

    fetched = prefetcher.take(lease, CPU, padded=padded)

    assert not fetched.damaged
    batch = fetched.content if padded else fetched.content.padded()
    assert torch.equal(batch.reward, torch.cat([made.reward for made in [*rows, later]]))
    assert "score" in batch.info and name not in batch.info
    prefetcher.close()


def test_rows_whose_advantages_have_another_form_than_those_of_the_newest_rows_are_set_aside(shelf):
    """As after `rollout.advantages` was changed: one a row before, one an action now."""
    parts = []
    for number, columns in enumerate((False, True, False)):
        made = made_up(rows=4, seed=number)
        made.advantages = made.action_log_probs.clone() if columns else made.reward.clone()
        encoded = codec.encode(made, shelf.arena.extent(number << 14, 1 << 14))
        version = 4 if columns else 3
        parts.append(ExtentRows(number << 14, encoded.nbytes, encoded.checksum, version, number, [0, 1, 2, 3]))
    prefetcher = Prefetcher(shelf.arena)

    fetched = prefetcher.take(Lease(1, 0, 4, parts), CPU)

    assert fetched.damaged.keys() == {0, 2}
    assert all("advantages in another form" in reason for reason in fetched.damaged.values())
    prefetcher.close()


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, Gathering(needs_reference=True, needs_log_probs=True)),
        ({"trainer": {"kl_coef": 0.0}}, Gathering(needs_log_probs=True)),
        ({"rollout": {"log_probs": "trainer"}}, Gathering(needs_reference=True)),
        (
            {"trainer": {"mask_cut_responses": True}},
            Gathering(needs_reference=True, needs_log_probs=True, needs_cut=True),
        ),
        # The KL is in the reward: the workers write the reference's log-probs, which only other trainers may use.
        ({"rollout": {"algorithm": "ppo"}}, Gathering(needs_log_probs=True)),
        (
            {"rollout": {"algorithm": "ppo"}, "trainer": {"kind": "external"}},
            Gathering(needs_reference=True, needs_log_probs=True),
        ),
    ],
)
def test_a_configuration_needs_the_fields_that_its_trainer_reads(sections, needed):
    assert Gathering.of(Config.model_validate(sections)) == needed
