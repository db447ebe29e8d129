"""Ranks of several machines that meet: those whose machine has other models than the first one's are refused."""

import datetime
import os
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as distributed

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.child_process import child_environment
from pipeline.runtime.role import Report
from pipeline.trainer import meeting, process
from pipeline.trainer.meeting import enter_group, forget_earlier, offer_address, refuse_other_models, tell_models
from tests.support import tiny


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """The folders of two machines, each with actor and reference, the same on both."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    for seed, name in enumerate(("actor", "reference")):
        tiny.llama(seed).save_pretrained(here / name)
    shutil.copytree(here, there, dirs_exist_ok=True)
    return here, there


class OpenStore(distributed.HashStore):
    """A store of this process, as one with a port."""

    port = 29500


@pytest.fixture
def store():
    return distributed.HashStore()


def config_of(machine, **trainer):
    return Config.model_validate(
        {
            "model": {
                "actor": str(machine / "actor"),
                "reference": str(machine / "reference"),
                "reference_device": "trainer",
            },
            "rollout": {"algorithm": "grpo"},
            "trainer": {"world_size": 2, "nodes": 2, "kl_coef": 0.1, **trainer},
            "cluster": {"engine": "ray"},
        }
    )


@pytest.fixture
def other(machines, tmp_path):
    """A machine whose folders can be changed."""
    shutil.copytree(machines[1], tmp_path / "other")
    return tmp_path / "other"


def test_machines_with_the_same_models_meet(machines, store):
    tell_models(config_of(machines[0]), store)

    refuse_other_models(config_of(machines[1]), store)


def test_a_machine_with_another_reference_is_refused_with_its_key_and_folder(machines, other, store):
    tell_models(config_of(machines[0]), store)
    tiny.llama(7).save_pretrained(other / "reference")

    with pytest.raises(ConfigError, match=rf"^model\.reference: {other}/reference has other weights here than on the"):
        refuse_other_models(config_of(other), store)


def test_a_machine_without_a_model_is_refused_with_its_key_and_folder(machines, other, store):
    tell_models(config_of(machines[0]), store)
    shutil.rmtree(other / "actor")

    with pytest.raises(ConfigError, match=rf"^model\.actor: {other}/actor is no folder of this machine$"):
        refuse_other_models(config_of(other), store)


def test_whole_models_that_the_first_rank_sends_may_differ(machines, other, store):
    tell_models(config_of(machines[0]), store)
    tiny.llama(7).save_pretrained(other / "actor")

    refuse_other_models(config_of(other), store)


def test_shards_of_another_actor_are_refused(machines, other, store):
    tell_models(config_of(machines[0], sharding="full"), store)
    tiny.llama(7).save_pretrained(other / "actor")

    with pytest.raises(ConfigError, match=rf"^model\.actor: {other}/actor has other weights here than on the"):
        refuse_other_models(config_of(other, sharding="full"), store)


@pytest.mark.parametrize(
    ("own", "found"),
    [({}, ["eth7", "eth7"]), ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}, ["ib0", "ib1"])],
)
def test_ranks_of_several_machines_speak_by_the_interface_of_their_meeting_or_the_users(
    machines, tmp_path, monkeypatch, own, found
):
    """On the daemon's machine too, with the variables that the supervisor gives a child."""
    for name in meeting.INTERFACES:
        # Noted first: what the call sets is undone with the rest.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for name, value in child_environment(gpu="", threads=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_interface_to", lambda host, port: "eth7")
    monkeypatch.setattr(meeting, "_store", lambda *_, **__: OpenStore())
    seen = []
    monkeypatch.setattr(
        distributed, "init_process_group", lambda *_, **__: seen.extend(map(os.environ.get, meeting.INTERFACES))
    )
    offer_address(tmp_path, 1, "127.0.0.1")
    context = SimpleNamespace(
        report=lambda report: None, folder=tmp_path, generation=1, index=0, stopping=False, in_process_group=False
    )

    enter_group(config_of(machines[0]), context)

    assert seen == found


def test_a_store_whose_port_is_closed_is_an_error_within_a_minute(monkeypatch):
    assert meeting._CONNECT.total_seconds() <= 60
    monkeypatch.setattr(meeting, "_CONNECT", datetime.timedelta(seconds=1))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))

        with pytest.raises(distributed.DistError):
            meeting._store("127.0.0.1", closed.getsockname()[1])


def test_files_of_earlier_meetings_are_removed_with_those_that_a_kill_left_half_written(tmp_path):
    earlier = ["ranks-2", "ranks-2.host", "ranks-2.host.4711", "ranks-2.meeting.4712"]
    present = ["ranks-3", "ranks-3.host", "ranks-3.host.4713", "ranks-10.meeting"]
    for name in (*earlier, *present):
        (tmp_path / name).touch()

    forget_earlier(tmp_path, 3)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(present)


@pytest.mark.parametrize(
    ("ranks", "message", "reports"),
    [
        (2, "third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer", [Report(killed=True)]),
        (2, "an error of its own", []),
        (1, "gloo", []),
    ],
)
def test_a_rank_whose_collective_fails_leaves_the_blame_to_the_rank_that_is_gone(monkeypatch, ranks, message, reports):
    """A killed process takes time to end: the supervisor may learn of this rank's end first."""

    class Trainer:
        finished = False

        def beat(self):
            raise RuntimeError(message)

        def abandon(self):
            pass

    told = []
    context = SimpleNamespace(ready=lambda device: None, in_process_group=True, stopping=True, report=told.append)
    monkeypatch.setattr(process, "join_ranks", lambda *given: None)
    monkeypatch.setattr(process, "new_trainer", lambda *given: Trainer())

    with pytest.raises(RuntimeError, match=r"an error of its own|gloo"):
        process.run(Config.model_validate({"trainer": {"world_size": ranks}}), context, lambda *given: None)

    assert told == reports
