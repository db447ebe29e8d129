"""The folder in shared memory: made, taken over from a dead supervisor of its run, cleared of another run's files."""

import contextlib
import logging
import os
import stat

import pytest
import torch

from pipeline.buffer.sizing import checked_layout, limits_of
from pipeline.config.lengths import row_bytes_bound
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models.weights.store import WeightsPublisher
from pipeline.runtime.messages import Welcome
from pipeline.runtime.transport import Mailbox, Outbox
from pipeline.runtime.workspace import Workspace
from pipeline.storage.arena import Arena
from pipeline.storage.ledger import Ledger
from pipeline.trainer.connect import lock_rank
from tests.support.daemon import END_TIMEOUT_S


def config(**buffer):
    return Config.model_validate({"buffer": {"arena_bytes": 4 << 20, **buffer}})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rlhfd-0-abc"


def test_everything_in_it_is_private(folder):
    workspace = Workspace.prepare(folder, config(), checked_layout(config()))

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    workspace.remove()
    assert not folder.exists()


def test_children_read_the_configuration_that_the_supervisor_wrote(folder):
    workspace = Workspace.prepare(folder, config(max_staleness=5), checked_layout(config(max_staleness=5)))

    again = Workspace.open(folder)

    assert again.run == workspace.run
    assert Config.model_validate_json(again.config_path.read_bytes()) == config(max_staleness=5)


def test_what_a_killed_supervisor_left_is_taken_over(folder):
    first = Workspace.prepare(folder, config(), checked_layout(config()))
    (folder / "buffer.sock").touch()
    (folder / "ranks-2").touch()
    inode = first.arena_path.stat().st_ino

    second = Workspace.prepare(folder, config(), checked_layout(config()))

    assert second.taken_over
    assert second.run.run_id == first.run.run_id
    assert second.arena_path.stat().st_ino == inode
    assert not (folder / "buffer.sock").exists()
    assert not (folder / "ranks-2").exists(), "the second generation of ranks would wait for dead ones there"


@pytest.mark.parametrize("left", [None, "", "[]", "{"])
def test_a_takeover_tells_of_the_keys_that_have_changed(folder, caplog, left):
    workspace = Workspace.prepare(folder, config(), checked_layout(config()))
    caplog.set_level(logging.INFO)
    if left is not None:
        workspace.config_path.write_text(left)
    for now in (config(), config(max_staleness=5)):
        assert Workspace.prepare(folder, now, checked_layout(now)).taken_over

    told = [record.message for record in caplog.records]
    assert told == [
        "the configuration is another one than that of the killed start: changed: buffer.max_staleness=1->5"
    ]


@pytest.mark.parametrize("kind", ["builtin", "external"])
def test_a_takeover_leaves_a_living_external_trainer_its_lock_and_its_mailbox(folder, kind):
    of = Config.model_validate({"trainer": {"kind": kind}, "buffer": {"arena_bytes": 4 << 20}})
    Workspace.prepare(folder, of, checked_layout(of))
    (folder / "buffer.sock").touch()
    lock = lock_rank(folder, 0)
    with contextlib.closing(Mailbox(folder, "trainer-0")) as mailbox:
        assert Workspace.prepare(folder, of, checked_layout(of)).taken_over

        left = sorted(path.name for path in folder.iterdir() if path.suffix in (".lock", ".sock"))
        assert left == ([] if kind == "builtin" else ["trainer-0.lock", "trainer-0.sock"])
        if kind == "external":
            with pytest.raises(ConfigError, match="trainer rank 0 is connected already"):
                lock_rank(folder, 0)
            with contextlib.closing(Outbox(folder, "trainer-0")) as of_next:
                of_next.send(Welcome(2))
                assert mailbox.receive(END_TIMEOUT_S) == [Welcome(2)]
    os.close(lock)


def test_the_arena_of_another_number_of_ranks_is_replaced_and_its_run_is_the_same(folder):
    first = Workspace.prepare(folder, config(), checked_layout(config()))
    of_two = Config.model_validate({"buffer": {"arena_bytes": 4 << 20}, "trainer": {"world_size": 2}})

    second = Workspace.prepare(folder, of_two, checked_layout(of_two))

    assert not second.taken_over and second.run.run_id != first.run.run_id
    assert second.run.identity == first.run.identity


@pytest.mark.parametrize(
    ("kind", "version", "left_bytes", "taken_over"),
    [
        ("builtin", 3, 0, False),
        ("builtin", 0, 0, True),
        ("builtin", 3, 1 << 20, True),
        ("builtin", 3, 9000, False),
        ("external", 3, 0, True),
    ],
)
def test_a_killed_run_whose_weights_are_gone_is_not_taken_over(folder, kind, version, left_bytes, taken_over):
    """Its ledger would drop all rows of the versions that are published again, as stale."""
    of_kind = Config.model_validate({"buffer": {"arena_bytes": 4 << 20}, "trainer": {"kind": kind}})
    left = Workspace.prepare(folder, of_kind, checked_layout(of_kind))
    with contextlib.closing(Arena(left.arena_path, payload=False)) as arena:
        ledger = Ledger(arena.ledger, checked_layout(of_kind))
        ledger.publish(version, 1, 0)
        ledger.close()
    if left_bytes:
        published(left.weights_path, version)
        os.truncate(left.weights_path, min(left_bytes, left.weights_path.stat().st_size))

    found = Workspace.prepare(folder, of_kind, checked_layout(of_kind))

    assert found.taken_over == taken_over


def test_a_folder_in_place_of_a_file_is_refused_by_its_path(folder):
    left = Workspace.prepare(folder, config(), checked_layout(config()))
    # As vLLM's ranks have.
    folder.joinpath("ranks").mkdir()
    assert Workspace.is_left(folder, config())
    left.weights_path.mkdir()

    with pytest.raises(ConfigError, match=f"^{left.weights_path} is a folder, where a daemon has a file: remove it"):
        Workspace.is_left(folder, config())


@pytest.mark.parametrize("left_bytes", [0, 9000])
def test_of_training_states_that_were_cut_off_a_takeover_leaves_those_that_are_whole(folder, caplog, left_bytes):
    """Without one the trainer goes back to its last checkpoint; one that is cut off would end it at each start."""
    left = Workspace.prepare(folder, config(), checked_layout(config()))
    whole, cut = folder / "training", folder / "training-1"
    for path in (left.weights_path, whole, cut):
        published(path, 3)
    os.truncate(cut, left_bytes)

    assert Workspace.prepare(folder, config(), checked_layout(config())).taken_over

    assert whole.exists() and not cut.exists()
    assert (
        f"was cut off in shared memory, the run goes on from its last checkpoint: version=-1 path={cut}" in caplog.text
    )


def published(path, version):
    """Publish a version to a new file of weights."""
    tensors = {"weight": torch.zeros(2)}
    with contextlib.closing(WeightsPublisher(path, tensors)) as publisher:
        publisher.publish(version, tensors)


def test_another_runs_arena_is_replaced(folder):
    first = Workspace.prepare(folder, config(), checked_layout(config()))
    left = os.open(folder, os.O_PATH)

    second = Workspace.prepare(
        folder,
        Config.model_validate({"daemon": {"seed": 1}, "buffer": {"arena_bytes": 4 << 20}}),
        checked_layout(Config.model_validate({"daemon": {"seed": 1}, "buffer": {"arena_bytes": 4 << 20}})),
    )

    assert not second.taken_over
    assert second.run.run_id != first.run.run_id
    assert os.fstat(left).st_nlink == 0, "an external trainer of the other run would send to this one"
    os.close(left)


def test_a_folder_that_was_never_finished_is_made_anew(folder):
    folder.mkdir(mode=0o700)
    (folder / "arena").write_bytes(b"half")

    assert not Workspace.prepare(folder, config(), checked_layout(config())).taken_over


def test_a_failed_start_leaves_nothing(folder):
    system = os.statvfs(folder.parent)

    with pytest.raises(ConfigError, match="does not fit"):
        Workspace.prepare(
            folder,
            config(arena_bytes=(system.f_blocks + 1) * system.f_frsize),
            checked_layout(config(arena_bytes=(system.f_blocks + 1) * system.f_frsize)),
        )

    assert not folder.exists()


def test_a_start_that_fails_leaves_what_a_killed_supervisor_left(folder, caplog):
    first = Workspace.prepare(folder, config(), checked_layout(config()))
    inode = first.arena_path.stat().st_ino
    first.config_path.unlink()
    first.config_path.mkdir()

    with pytest.raises(IsADirectoryError):
        Workspace.prepare(folder, config(), checked_layout(config()))

    assert "stays for the next start" in caplog.text
    first.config_path.rmdir()
    again = Workspace.prepare(folder, config(), checked_layout(config()))
    assert again.taken_over and again.arena_path.stat().st_ino == inode


def test_a_configuration_takes_the_place_of_a_longer_one(folder):
    Workspace.prepare(
        folder,
        Config.model_validate({"daemon": {"name": "a" * 20}, "buffer": {"arena_bytes": 4 << 20}}),
        checked_layout(Config.model_validate({"daemon": {"name": "a" * 20}, "buffer": {"arena_bytes": 4 << 20}})),
    )

    again = Workspace.prepare(folder, config(), checked_layout(config()))

    assert again.taken_over
    assert Config.model_validate_json(again.config_path.read_bytes()) == config()


def test_an_arena_too_small_for_a_batch_is_refused_with_both_sizes(folder):
    least = r'take up to .* B, 1,336 B each; arena_bytes = "1MiB" is enough$'
    rows = "65,536 B cannot hold a batch a rank and a ticket: 384 rows of 24 tokens"
    with pytest.raises(ConfigError, match=rf"{rows} {least}"):
        Workspace.prepare(folder, config(arena_bytes=65536), checked_layout(config(arena_bytes=65536)))


def test_limits_follow_from_the_configuration():
    limits = limits_of(config(max_staleness=2, limit=3))

    assert (limits.sample_batch_size, limits.rows_per_version, limits.group_size) == (256, 256, 8)
    assert (limits.max_staleness, limits.limit_batches, limits.prompts_per_ticket) == (2, 3, 16)


def test_room_for_a_row_is_text_unless_it_is_configured():
    assert limits_of(config()).row_bytes == row_bytes_bound(24)
    assert limits_of(config(row_bytes="2KiB")).row_bytes == 2048


def test_an_arena_too_small_for_configured_rows_is_refused_with_the_room_they_ask_for(folder):
    # A batch of 256 rows and a ticket of 128, and the headers of two extents.
    with pytest.raises(ConfigError, match=r"384 rows of buffer.row_bytes = 1,048,576 B take up to 402,669,568 B"):
        Workspace.prepare(folder, config(row_bytes="1MiB"), checked_layout(config(row_bytes="1MiB")))


def test_more_room_for_rows_goes_on_with_the_arena_that_was_left(folder):
    first = Workspace.prepare(folder, config(), checked_layout(config()))

    second = Workspace.prepare(folder, config(row_bytes="8KiB"), checked_layout(config(row_bytes="8KiB")))

    assert second.taken_over
    assert second.run.run_id == first.run.run_id


def test_more_batches_at_once_than_there_are_leases_are_refused(folder):
    greedy = Config.model_validate(
        {"trainer": {"publish_every": 2048, "world_size": 2}, "buffer": {"arena_bytes": 1 << 40}}
    )

    with pytest.raises(ConfigError, match=r"2 ranks would hold 4,098 batches at once, .* at most 4,096"):
        Workspace.prepare(folder, greedy, checked_layout(greedy))


@pytest.mark.parametrize(
    ("rollout", "rows", "trainer", "message"),
    [
        ({"algorithm": "ppo", "batch_size": 1}, 8736, {}, ""),
        ({"algorithm": "ppo", "batch_size": 1}, 8737, {}, r"a batch, 8,737 rows, would be 8,737 tickets of 1 row; "),
        ({"batch_size": 1, "num_generations": 8}, 47656, {}, ""),
        ({"batch_size": 1, "num_generations": 8}, 51200, {}, r"would be 6,400 tickets of 8 rows; .* room for 5,957: "),
        ({"algorithm": "ppo", "batch_size": 1}, 8192, {"gradient_accumulation_steps": 2}, ""),
        (
            {"algorithm": "ppo", "batch_size": 1}, 8192, {"gradient_accumulation_steps": 3},
            r"what a version is trained on, 24,576 rows, would be 24,576 tickets of 1 row; .* room for 16,384: ",
        ),
    ],
)  # fmt: skip
def test_more_tickets_in_a_batch_or_version_than_the_ledger_holds_are_refused(rollout, rows, trainer, message):
    of = Config.model_validate(
        {"rollout": rollout, "trainer": trainer, "buffer": {"sample_batch_size": rows, "arena_bytes": 1 << 34}}
    )

    if message:
        with pytest.raises(ConfigError, match=rf"^rollout\.batch_size: .*{message}"):
            checked_layout(of)
        return
    layout = checked_layout(of)
    ledger = Ledger(memoryview(bytearray(layout.nbytes)), layout)
    ledger.publish(0, 1, 0)
    for place in range(0, rows, layout.rows_per_extent):
        record = ledger.reserve(rows=layout.rows_per_extent, prompts=1, offset=64 * place, nbytes=64, owner=0)
        ledger.seal(
            record, rows=record.rows, nbytes=64, checksum=1, policy_version=0, fingerprint=1, now_s=0.0
        )  # fmt: skip
    ledger.acknowledge(ledger.lease(ledger.index.oldest_rows(rows)))
    assert ledger.totals.trained == rows
    ledger.close()


def test_a_link_or_a_file_under_its_name_is_refused_and_what_it_leads_to_is_left_alone(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").touch()
    for place in (
        lambda: folder.symlink_to(tmp_path / "mine"),
        lambda: folder.symlink_to(tmp_path / "no"),
        folder.touch,
    ):
        place()

        with pytest.raises(ConfigError, match="is not a directory"):
            Workspace.prepare(folder, config(), checked_layout(config()))

        assert (tmp_path / "mine" / "work").exists()
        folder.unlink()


def test_shared_memory_in_which_nothing_can_be_made_is_refused_with_the_reason(tmp_path):
    folder = tmp_path / "gone" / "rlhfd-0-abc"

    with pytest.raises(ConfigError, match=f"{folder} cannot be made: No such file or directory"):
        Workspace.prepare(folder, config(), checked_layout(config()))
