"""A real daemon at the limits of its machine: shared memory, disk and open files; prompts that give or teach nothing.

Where a file system must be full, the daemon gets small ones of its own, in a mount namespace that ends with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.errors import ExitCode
from pipeline.prompts.source import PromptSource
from tests.support.daemon import END_TIMEOUT_S, PROGRAM, SMALL, Daemon, is_alive, telling_reward, total, wait_until

pytestmark = pytest.mark.integration

BAD_CONFIG = int(ExitCode.BAD_CONFIG)
GAVE_UP = int(ExitCode.GAVE_UP)
FAILED = int(ExitCode.FAILED)
ARENA_BYTES = 8 << 20
SMALL_ARENA = (*SMALL, f"buffer.arena_bytes={ARENA_BYTES}")
BOTH_SIZES = r" of [\d,]+ B does not fit: [\d,]+ B free of [\d,]+ B on /dev/shm/rlhfd-"
GROUP_SIZE = 4


class Machine:
    """Small file systems, in a mount namespace that outlives its daemons.

    Attributes:
        mounts: The namespace.
        root: Its top folder, as it is seen from here.
    """

    def __init__(self, keeper: int, state: Path) -> None:
        self.mounts, self.root = Path(f"/proc/{keeper}/ns/mnt"), Path(f"/proc/{keeper}/root")
        self._state = state

    def do(self, command: str) -> None:
        inside = command.format(state=self._state)
        subprocess.run(["nsenter", f"--mount={self.mounts}", "sh", "-ec", inside], check=True)


@contextmanager
def machine(folder: Path, **sizes: int) -> Iterator[Machine]:
    """Mount small file systems: ``shm`` and ``state``, in bytes."""
    places = {"shm": Path("/dev/shm"), "state": folder / "state"}
    lines = [f"mkdir -p {places[name]} && mount -t tmpfs -o size={size} none {places[name]}"
             for name, size in sizes.items()]  # fmt: skip
    inside = " && ".join([*lines, "echo there", "exec sleep 1000"])
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", inside], stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None and keeper.stdout.readline() == b"there\n"
            yield Machine(keeper.pid, places["state"])
        finally:
            keeper.kill()


def steps(daemon: Daemon) -> float:
    """Return the steps taken; asked by HTTP, for the control socket lies in shared memory of its own."""
    return total(daemon.metrics(), "rlhfd_train_steps_total") if daemon.answers_http() else 0.0


def wait_steps(daemon: Daemon, more: int) -> None:
    goal = steps(daemon) + more
    daemon.wait_until(lambda: steps(daemon) >= goal, f"{more} more steps")


def arena_file_bytes() -> int:
    from pipeline.buffer.sizing import ledger_layout
    from pipeline.config.schema import Config
    from pipeline.storage.arena import PAGE_BYTES

    config = Config.model_validate(
        {
            "buffer": {"arena_bytes": ARENA_BYTES, "sample_batch_size": 32},
            "rollout": {"num_generations": GROUP_SIZE},
        }
    )
    return PAGE_BYTES + -(-ledger_layout(config).nbytes // PAGE_BYTES) * PAGE_BYTES + ARENA_BYTES


# Shared memory.


@pytest.mark.needs("unshare", "mount")
@pytest.mark.parametrize("pages_beside_the_arena", [-1, 0, 1, 2])
def test_shared_memory_too_small_for_any_file_of_a_start_is_refused_with_both_sizes(
    tmp_path: Path, task: Path, pages_beside_the_arena: int
) -> None:
    shm = arena_file_bytes() + 4096 * pages_beside_the_arena
    with machine(tmp_path, shm=shm) as small, Daemon(tmp_path, *SMALL_ARENA, task=task, mounts=small.mounts) as daemon:
        assert daemon.wait() == BAD_CONFIG, daemon.errors

    assert re.fullmatch(rf"[^\n]+{BOTH_SIZES}\S+\n", daemon.errors)
    assert list(daemon.runtime_dir.iterdir()) == []


@pytest.mark.needs("unshare", "mount")
def test_shared_memory_too_small_for_the_weights_ends_the_start_with_both_sizes(tmp_path: Path, task: Path) -> None:
    shm = arena_file_bytes() + (1 << 20)
    with machine(tmp_path, shm=shm) as small, Daemon(tmp_path, *SMALL_ARENA, task=task, mounts=small.mounts) as daemon:
        assert daemon.wait() == BAD_CONFIG, daemon.errors

    assert re.search(rf"weights in 2 slots of [\d,]+ B each, a file{BOTH_SIZES}", daemon.errors.splitlines()[-1])
    assert "restart in" not in daemon.errors and "Traceback" not in daemon.errors


@pytest.mark.needs("unshare", "mount")
def test_a_run_goes_on_when_others_fill_shared_memory_even_with_new_processes(tmp_path: Path, task: Path) -> None:
    with (
        machine(tmp_path, shm=64 << 20) as small,
        Daemon(tmp_path, *SMALL_ARENA, task=task, mounts=small.mounts) as daemon,
    ):
        daemon.wait_logged("ready: process=trainer-0")
        wait_steps(daemon, 2)
        shared_memory = Path(f"/proc/{daemon.pid}/root/dev/shm")
        fill(shared_memory / "somebody-elses")
        assert os.statvfs(shared_memory).f_bavail == 0

        wait_steps(daemon, 3)
        for name in ("buffer-0", "rollout-0", "trainer-0"):
            ready = daemon.errors.count(f"ready: process={name.removesuffix('-0') if name == 'buffer-0' else name}")
            os.kill(child(daemon, name), signal.SIGKILL)
            shown = "buffer" if name == "buffer-0" else name
            daemon.wait_until(
                lambda shown=shown, ready=ready: daemon.errors.count(f"ready: process={shown}") > ready,
                f"{name} is back",
            )
            wait_steps(daemon, 2)

        assert total(daemon.metrics(), "rlhfd_items_unaccounted") == 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    assert "resumed from shared memory" in daemon.errors


@pytest.mark.variant
@pytest.mark.needs("unshare", "nsenter", "mount")
def test_a_killed_run_is_taken_over_where_others_have_filled_shared_memory(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL_ARENA, "trainer.max_steps=0", "trainer.save_every=0")
    with machine(tmp_path, shm=64 << 20) as small:
        with Daemon(tmp_path, *settings, task=task, mounts=small.mounts) as daemon:
            wait_steps(daemon, 3)
            fill(Path(f"/proc/{daemon.pid}/root/dev/shm/somebody-elses"))
            family, before = daemon.family(), steps(daemon)
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")

        # Another number of workers needs other metrics, for which there is no room.
        more = (*settings, "rollout.workers=2")
        with Daemon(tmp_path, *more, task=task, mounts=small.mounts, name="refused") as refused:
            assert refused.wait() == BAD_CONFIG, refused.errors
        assert re.search(rf"a metrics slab{BOTH_SIZES}", refused.errors)
        assert "stays for the next start" in refused.errors

        changed = (*settings, "daemon.log_level=debug")
        with Daemon(tmp_path, *changed, task=task, mounts=small.mounts, name="again") as again:
            again.wait_logged("arena taken over from a supervisor that was killed")
            again.wait_until(lambda: steps(again) >= before + 3, "it goes on")
            assert total(again.metrics(), "rlhfd_items_unaccounted") == 0
            again.signal(signal.SIGTERM)
            assert again.wait() == 0, again.errors
        assert "resumed from shared memory" in again.errors


def fill(path: Path) -> None:
    """Take all that is left of a small file system."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


def child(daemon: Daemon, name: str) -> int:
    """Return the pid of a process by the title that it gave itself."""
    role, _, index = name.partition("-")
    return next(
        pid for pid in daemon.family() if f"{role} {index}" in Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    )


# Disk.


FAULTS = {
    # Over the writable one, whose open files stay: no kernel takes writes away from a mount that has writers.
    "read-only": ("mount --bind {state} {state} && mount -o remount,bind,ro {state}", "umount {state}"),
    "full": ("cat /dev/zero >{state}/somebody-elses 2>/dev/null || true", "rm {state}/somebody-elses"),
}


def end_of(daemon: Daemon) -> list[str]:
    return re.findall(r"training ended: (steps=\d+ weights=\w+ experiences=\w+)", daemon.errors)


@pytest.mark.needs("unshare", "nsenter", "mount")
def test_the_end_of_a_run_on_a_full_disk_stays_in_shared_memory_and_the_next_start_writes_it(
    tmp_path: Path, task: Path
) -> None:
    settings = (*SMALL_ARENA, "trainer.save_every=2", "trainer.max_steps=3", "samples.per_minute=0")
    with machine(tmp_path, state=1 << 20) as small:
        with Daemon(
            tmp_path, *settings, *telling_reward(tmp_path, pause_s=0.02), task=task, mounts=small.mounts
        ) as daemon:
            seen = daemon.wait_until(lambda: counted_errors(daemon), "a checkpoint that failed is counted")
            written = Path(f"{small.root}{daemon.state_dir}").glob("runs/*/checkpoints/*")
            left = [path.name for path in written if not path.name.startswith(".")]
            assert daemon.wait() == FAILED, daemon.errors
        failed = re.findall(r"checkpoint \S+/(step-\d+) could not be written: .*; [\d,]+ B were written", daemon.errors)
        assert (seen >= 1, left, failed) == (True, [], ["step-000002", "step-000003"])
        assert re.search(
            rf"trainer-0 has not written the last checkpoint, .*weights and training state of version 3 stay in "
            rf"{daemon.shm_dir} for the next start, .*make room in {daemon.state_dir}", daemon.errors.splitlines()[-1],
        )  # fmt: skip

        # Still full: nothing is lost by a start.
        settings = (*settings, *telling_reward(tmp_path))
        with Daemon(tmp_path, *settings, task=task, mounts=small.mounts, name="again") as again:
            assert again.wait() == FAILED, again.errors
        small.do(f"mount -o remount,size={64 << 20} {{state}}")
        with Daemon(tmp_path, *settings, task=task, mounts=small.mounts, name="with-room") as last:
            assert last.wait() == 0, last.errors

    assert end_of(daemon) == end_of(again) == end_of(last) != []
    assert "resumed from shared memory: version=3 step=3" in last.errors
    assert re.search(r"checkpoint written: step=3 ", last.errors)
    assert not last.shm_dir.exists()


@pytest.mark.needs("unshare", "nsenter", "mount")
@pytest.mark.parametrize("fault", ["read-only", pytest.param("full", marks=pytest.mark.variant)])
def test_a_run_whose_disk_takes_nothing_more_goes_on_and_its_end_stays_in_shared_memory(
    tmp_path: Path, task: Path, fault: str
) -> None:
    """The training state, which the run keeps on disk, is in shared memory then, too."""
    settings = (*SMALL_ARENA, "buffer.max_staleness=0", "trainer.keep_state=disk", *telling_reward(tmp_path))
    with machine(tmp_path, state=64 << 20) as small:
        with Daemon(tmp_path, *settings, "trainer.max_steps=0", task=task, mounts=small.mounts) as daemon:
            wait_steps(daemon, 2)
            small.do(FAULTS[fault][0])
            os.kill(daemon.pids()["buffer-0"], signal.SIGKILL)
            wait_steps(daemon, 2)
            ended = daemon.ask("stop")
            assert daemon.wait() == FAILED, daemon.errors
        told = f"it has ended, and not all of it is on disk: {daemon.shm_dir} keeps the rest for the next start, "
        assert (ended.returncode, ended.stderr) == (FAILED, f"{told}`rlhfd logs` has the reason\n")
        assert "Traceback" not in daemon.errors
        assert f"stay in {daemon.shm_dir} for the next start" in daemon.errors.splitlines()[-1]
        small.do(FAULTS[fault][1])
        (stopped,) = re.findall(r"training ended: steps=(\d+)", daemon.errors)
        most = f"trainer.max_steps={int(stopped) + 2}"
        with Daemon(tmp_path, *settings, most, task=task, mounts=small.mounts, name="again") as again:
            assert again.wait() == 0, again.errors
        assert f"resumed from shared memory: version={stopped} step={stopped}" in again.errors
        sealed, *parts = re.findall(
            r"sealed (\d+) = trained (\d+) \+ dropped (\d+).*ready (\d+) \+ leased (\d+)", again.errors
        )[-1]
        assert int(sealed) == sum(map(int, parts)) and int(parts[0]) == 32 * (int(stopped) + 2)
    (tmp_path / "whole").mkdir()
    telling_reward(tmp_path / "whole")
    with Daemon(tmp_path / "whole", *settings, most, task=task) as whole:
        assert whole.wait() == 0, whole.errors
    assert end_of(again) == end_of(whole)


@pytest.mark.parametrize("name", ["metrics", "arena", "weights", pytest.param("training", marks=pytest.mark.variant)])
def test_a_file_in_shared_memory_that_is_cut_off_ends_the_run_which_names_it_and_leaves_nothing(
    tmp_path: Path, task: Path, name: str
) -> None:
    """A process that reads or writes beyond the end dies of SIGBUS, the supervisor never."""
    with Daemon(tmp_path, *SMALL_ARENA, "trainer.max_steps=0", *telling_reward(tmp_path), task=task) as daemon:
        wait_steps(daemon, 2)
        path = daemon.shm_dir / name
        whole = path.stat().st_size
        os.truncate(path, 0 if name in ("metrics", "weights") else whole // 2)

        assert daemon.wait() == FAILED, daemon.errors

    left = 0 if name in ("metrics", "weights") else whole // 2
    last = daemon.errors.splitlines()[-1]
    assert last.endswith(f"shared memory was truncated by another program: {path} holds {left:,} B of {whole:,} B")
    assert "is invalid" not in daemon.errors and "Fatal Python error" not in daemon.errors.split("supervisor")[-1]
    assert not any(daemon.runtime_dir.iterdir()) and not (daemon.state_dir / "lock").exists()
    # Without metrics a process may die of SIGBUS before it has written the end, which then stays for the next start.
    is_kept = name == "metrics" and f"stay in {daemon.shm_dir} for the next start" in daemon.errors
    assert daemon.shm_dir.exists() == is_kept
    if is_kept:
        with Daemon(tmp_path, *SMALL_ARENA, "trainer.max_steps=1", *telling_reward(tmp_path), task=task) as again:
            assert again.wait() == 0, again.errors
    written = [*daemon.run_dir.glob("checkpoints/step-*")]
    assert bool(written) == (name in ("metrics", "arena")), "weights and training state are whole there"


def test_a_folder_in_shared_memory_that_is_removed_ends_the_run_which_names_it_and_leaves_nothing(
    tmp_path: Path, task: Path
) -> None:
    """As logind removes it at the last logout of its user; children have errors of their own meanwhile."""
    settings = (*SMALL_ARENA, "trainer.save_every=1", *telling_reward(tmp_path))
    with Daemon(tmp_path, *settings, "trainer.max_steps=0", task=task) as daemon:
        wait_steps(daemon, 2)
        daemon.wait_until((daemon.run_dir / "checkpoints/latest.json").exists, "there is a checkpoint")
        shutil.rmtree(daemon.shm_dir)

        assert daemon.wait() == FAILED, daemon.errors

    assert f"shared memory was removed by another program: {daemon.shm_dir} is gone" in daemon.errors.splitlines()[-1]
    assert "unexpected error" not in daemon.errors
    assert not daemon.shm_dir.exists() and not any(daemon.runtime_dir.iterdir())
    step = json.loads((daemon.run_dir / "checkpoints/latest.json").read_text())["step"]
    with Daemon(tmp_path, *settings, f"trainer.max_steps={step + 2}", task=task) as again:
        assert again.wait() == 0, again.errors
    assert "prompts go on from the checkpoint" in again.errors


def counted_errors(daemon: Daemon) -> float:
    if not daemon.answers_http():
        return 0.0
    return total(daemon.metrics(), "rlhfd_checkpoints_total", result="error")


# Open files.


def test_at_the_least_limit_of_open_files_it_runs_and_below_it_is_refused(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL_ARENA, "trainer.max_steps=2")
    # 128, 8 for each of buffer, trainer and worker, and 256 connections that the HTTP server may hold.
    for limit, code in ((407, BAD_CONFIG), (408, 0)):
        program = tmp_path / f"rlhfd-{limit}"
        program.write_text(f'#!/bin/sh\nulimit -n {limit}\nexec {PROGRAM} "$@"\n')
        program.chmod(0o700)

        with Daemon(tmp_path, *settings, task=task, program=program, name=f"daemon-{limit}") as daemon:
            assert daemon.wait() == code, daemon.errors

        if code:
            assert daemon.errors == (
                "the limit of open files is 407, 408 are needed: raise it (ulimit -n, LimitNOFILE=)\n"
            )


# Prompts that give nothing, or teach nothing.

REWARDS = """
from pathlib import Path
SEEN = Path(__file__).with_name("seen")

def fails_after_the_start(ids, mask, **_):
    seen = SEEN.exists() and SEEN.stat().st_size
    with SEEN.open("a") as file:
        file.write("x")
    if seen >= 4:
        raise ValueError("no luck any more")
    return float(seen)

def fails_after_some_steps(ids, mask, **_):
    seen = SEEN.exists() and SEEN.stat().st_size
    with SEEN.open("a") as file:
        file.write("x")
    if seen >= 200:
        raise ValueError("no luck any more")
    return float(seen)

def constant(ids, mask, *, gt_answer, **_):
    with SEEN.open("a") as file:
        file.write(gt_answer + "\\n")
    return 0.5
"""


def prompt_file(folder: Path, count: int) -> Path:
    path = folder / "prompts.jsonl"
    texts = [f"{digit}302>" for digit in range(count)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "".join(sorted(text))}) + "\n" for text in texts))
    (folder / "rewards_of_test.py").write_text(REWARDS)
    return path


@pytest.mark.parametrize("arguments", [(), ("--serial",)], ids=["daemon", "serial"])
def test_a_whole_epoch_that_gives_nothing_ends_the_run_and_says_so(
    tmp_path: Path, task: Path, arguments: tuple[str, ...]
) -> None:
    path = prompt_file(tmp_path, 3)
    settings = (f"prompts.path={path}", 'rewards=["rewards_of_test:fails_after_the_start"]')

    with Daemon(tmp_path, *SMALL_ARENA, *settings, task=task, arguments=arguments) as daemon:
        assert daemon.wait() == GAVE_UP, daemon.errors

    assert re.search(r"\d prompts in a row, a whole epoch, gave no experience; the log says why$", daemon.errors, re.M)
    assert "rollout failed: ticket=" in daemon.errors
    assert "fails_after_the_start raised ValueError" in daemon.errors
    assert "restart in" not in daemon.errors


@pytest.mark.parametrize(
    "arguments", [pytest.param((), marks=pytest.mark.variant), ("--serial",)], ids=["daemon", "serial"]
)
def test_the_steps_before_an_epoch_that_gives_nothing_are_in_a_checkpoint(
    tmp_path: Path, task: Path, arguments: tuple[str, ...]
) -> None:
    path = prompt_file(tmp_path, 3)
    settings = (f"prompts.path={path}", 'rewards=["rewards_of_test:fails_after_some_steps"]', "trainer.save_every=1000")

    with Daemon(tmp_path, *SMALL_ARENA, *settings, task=task, arguments=arguments) as daemon:
        assert daemon.wait() == GAVE_UP, daemon.errors

    assert "a whole epoch, gave no experience; the log says why" in daemon.errors
    (latest,) = tmp_path.glob("state/runs/*/checkpoints/latest.json")
    assert json.loads(latest.read_text())["step"] > 1


def test_groups_that_teach_nothing_are_counted_and_told_and_every_epoch_takes_each_prompt_once(
    tmp_path: Path, task: Path
) -> None:
    path = prompt_file(tmp_path, 5)
    settings = (f"prompts.path={path}", 'rewards=["rewards_of_test:constant"]', "daemon.seed=3")

    with Daemon(tmp_path, *SMALL_ARENA, *settings, task=task) as daemon:
        daemon.wait_logged("nothing to learn from, in every group all rewards are equal: steps_in_a_row=20")
        daemon.wait_step(25)
        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_groups_total", signal="mixed") == 0
        assert total(metrics, "rlhfd_groups_total", signal="all_equal") >= 25 * 32 / GROUP_SIZE
        assert total(metrics, "rlhfd_tokens_total", kind="trained") == 0
        steps, idle = (total(metrics, f"rlhfd_train_{kind}_total") for kind in ("steps", "idle_steps"))
        # The scrape may lie between the two.
        assert steps >= 25 and steps - 1 <= idle <= steps
        assert daemon.status()["why"].startswith("Nothing to learn")
        # The page's paragraph is these sentences.
        assert json.loads(daemon.get("/api/live")[1])["why"][0].startswith("Nothing to learn")
        assert total(metrics, "rlhfd_policy_version", role="trainer") >= 24
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors

    assert daemon.errors.count("nothing to learn from") == 1
    lines = [json.loads(line) for line in (daemon.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {(line["rows"], line["rows_trained"], line["tokens_trained"]) for line in lines} == {(32, 0, 0)}
    answers = (tmp_path / "seen").read_text().splitlines()
    groups = answers[::GROUP_SIZE]
    source = PromptSource(path, 3)
    # The first was the try-out of the start; a batch of 8 prompts ends within an epoch of 5.
    rolled = groups[1:]
    assert rolled[:200] == [source.at(position).answer for position in range(200)]
    for epoch in range(40):
        assert sorted(rolled[5 * epoch : 5 * epoch + 5]) == sorted({source.at(p).answer for p in range(5)})
    source.close()
