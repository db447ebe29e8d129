"""A real daemon with two ranks whose process group behaves as NCCL's: leaving it waits for the other ranks.

Without GPUs the ranks meet over gloo, whose teardown waits for nobody. The code that every process loads first gives it
NCCL's: it returns once all ranks leave, and never while one of them waits in a collective.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon, loaded_first

pytestmark = pytest.mark.integration
HANG_S = 4.0
TWO_RANKS = (*SMALL, "trainer.world_size=2", "trainer.max_steps=4", f"daemon.hang_timeout_s={HANG_S}")
LEAVING_TOGETHER = """
def change_torch_distributed(module):
    destroy = module.destroy_process_group
    def waiting_for_all():
        module.barrier()
        destroy()
    module.destroy_process_group = waiting_for_all
"""
FAILING = """
def change_pipeline_trainer_trainer(module):
    poll = module.Trainer.poll
    def failing(self):
        if self._connection.rank == 1 and self.step == 2:
            try:
                os.close(os.open({once!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                raise ValueError("the card fell off the bus")
        return poll(self)
    module.Trainer.poll = failing
"""
SAVING_SLOWLY = """
def change_pipeline_trainer_process(module):
    save = module.save_checkpoint
    def slowly(*arguments, telemetry, **named):
        for _ in range({beats}):
            telemetry.progress()
            time.sleep(0.1)
        return save(*arguments, telemetry=telemetry, **named)
    module.save_checkpoint = slowly
"""


def test_the_error_of_a_rank_reaches_the_log_and_both_go_on(tmp_path: Path, task: Path) -> None:
    environment = loaded_first(tmp_path, LEAVING_TOGETHER + FAILING.format(once=str(tmp_path / "has-failed")))
    settings = (*TWO_RANKS, "daemon.hang_timeout_s=0")
    with Daemon(tmp_path, *settings, task=task, environment=environment) as daemon:
        daemon.wait_logged("ValueError: the card fell off the bus")
        assert daemon.wait() == 0, daemon.errors

    assert "trainer-1 failed" in daemon.errors
    assert daemon.errors.count("training ended: steps=4") == 2


def test_no_rank_waits_while_the_last_checkpoint_is_written(tmp_path: Path, task: Path) -> None:
    environment = loaded_first(tmp_path, LEAVING_TOGETHER + SAVING_SLOWLY.format(beats=int(30 * HANG_S)))
    with Daemon(tmp_path, *TWO_RANKS, task=task, environment=environment) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("training ended: steps=4")
        assert "checkpoint written" not in daemon.errors, "the other rank has ended before it"
        assert daemon.wait() == 0, daemon.errors

    assert daemon.errors.count("training ended: steps=4") == 2
    assert "checkpoint written: step=4" in daemon.errors
    assert "no progress" not in daemon.errors and "restart in" not in daemon.errors
