"""The GPU and the cores of each process."""

import pytest

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.supervisor.placement import assign, local_cpus, visible_gpus, worker_count


def config(**sections):
    return Config.model_validate(sections)


def gpus_of(devices):
    return {f"{role}-{index}": own.gpu for (role, index), own in devices.items()}


def test_the_trainer_takes_the_first_gpu_and_each_other_one_gets_a_worker():
    devices = assign(config(), ["0", "1", "2", "3"], range(8))

    assert gpus_of(devices) == {"trainer-0": "0", "rollout-0": "1", "rollout-1": "2", "rollout-2": "3"}


def test_a_single_gpu_is_shared():
    assert gpus_of(assign(config(), ["GPU-abc"], range(8))) == {"trainer-0": "GPU-abc", "rollout-0": "GPU-abc"}


def test_without_a_gpu_everything_runs_on_the_cpu():
    assert gpus_of(assign(config(rollout={"workers": 2}), [], range(8))) == {
        "trainer-0": "",
        "rollout-0": "",
        "rollout-1": "",
    }


def test_named_devices_are_taken_as_they_are():
    chosen = config(rollout={"devices": [3, 1]}, trainer={"devices": [2]})

    assert gpus_of(assign(chosen, ["a", "b", "c", "d"], range(8))) == {
        "trainer-0": "c",
        "rollout-0": "d",
        "rollout-1": "b",
    }


@pytest.mark.parametrize(
    ("rollout", "gpus", "expected"),
    [
        ({}, "abcde", {"trainer-0": "a", "rollout-0": "b,c", "rollout-1": "d,e"}),
        # The rest is of no use.
        ({}, "abcd", {"trainer-0": "a", "rollout-0": "b,c"}),
        ({"workers": 3}, "abcde", {"trainer-0": "a", "rollout-0": "b,c", "rollout-1": "d,e", "rollout-2": "b,c"}),
        ({"devices": [3, 1]}, "abcd", {"trainer-0": "a", "rollout-0": "d,b"}),
        ({"devices": [0, 1]}, "ab", {"trainer-0": "a", "rollout-0": "a,b"}),
        ({}, "", {"trainer-0": "", "rollout-0": ""}),
    ],
)
def test_each_worker_has_as_many_gpus_as_its_engine_splits_the_model_over(rollout, gpus, expected):
    chosen = config(rollout={"engine": "vllm", "tensor_parallel": 2, **rollout})

    assert gpus_of(assign(chosen, list(gpus), range(8))) == expected
    assert worker_count(chosen, list(gpus)) == len(expected) - 1


def test_a_worker_of_several_gpus_has_the_cores_of_the_first():
    chosen = config(rollout={"engine": "vllm", "tensor_parallel": 2})
    nodes = {"a": range(4), "b": range(4, 8), "c": range(4, 8)}

    devices = assign(chosen, ["a", "b", "c"], range(8), nodes)

    assert devices["trainer", 0].cpus == (0, 1, 2, 3) and devices["rollout", 0].cpus == (4, 5, 6, 7)


def test_an_external_trainer_leaves_all_gpus_to_the_workers():
    assert worker_count(config(trainer={"kind": "external"}), ["0", "1"]) == 2


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"kind": "external", "devices": [0]}, ["b", "c", "d"]),
        ({"kind": "external", "devices": [1, 3]}, ["a", "c"]),
        ({"devices": [0, 1]}, ["c", "d"]),
    ],
)
def test_gpus_that_the_trainer_is_given_have_no_worker_and_the_others_one_each(trainer, expected):
    gpus = ["a", "b", "c", "d"]

    devices = assign(config(trainer=trainer), gpus, range(8))

    assert [gpu for name, gpu in gpus_of(devices).items() if name.startswith("rollout")] == expected


def test_workers_that_compute_in_a_cluster_take_neither_gpu_nor_core_here():
    chosen = config(cluster={"engine": "ray"}, rollout={"workers": 3}, trainer={"world_size": 2})

    devices = assign(chosen, ["a", "b", "c", "d"], range(8))

    assert gpus_of(devices) == {"trainer-0": "a", "trainer-1": "b", "rollout-0": "", "rollout-1": "", "rollout-2": ""}
    assert devices["trainer", 0].cpus == (0, 1, 2, 3) and devices["trainer", 1].cpus == (4, 5, 6, 7)
    assert devices["rollout", 0].cpus == ()
    assert worker_count(chosen, ["a", "b", "c", "d"]) == 3


def test_ranks_of_other_machines_take_neither_gpu_nor_core_here():
    chosen = config(cluster={"engine": "ray"}, trainer={"world_size": 4, "nodes": 2})

    devices = assign(chosen, ["a", "b"], range(8))

    assert gpus_of(devices) == {"trainer-0": "a", "trainer-1": "b", "trainer-2": "", "trainer-3": "", "rollout-0": ""}
    assert devices["trainer", 1].cpus == (4, 5, 6, 7) and devices["trainer", 2].cpus == ()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"devices": [4]}}, "rollout.devices: device 4 is not there, 2 GPUs are visible"),
        ({"trainer": {"world_size": 3}}, "3 ranks need a GPU each, 2 are there"),
        (
            {"rollout": {"engine": "vllm", "tensor_parallel": 2}},
            "rollout.tensor_parallel: a worker needs 2 GPUs, 1 is there for workers",
        ),
    ],
)
def test_what_is_not_there_is_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        assign(config(**sections), ["0", "1"], range(8))


def test_cores_are_shared_out_without_overlap():
    devices = assign(config(rollout={"workers": 2}), [], range(7))

    cores = [core for own in devices.values() for core in own.cpus]
    assert sorted(cores) == list(range(7))
    assert all(own.cpus for own in devices.values())


def test_with_fewer_cores_than_processes_none_is_pinned():
    assert {own.cpus for own in assign(config(rollout={"workers": 3}), [], [0, 1]).values()} == {()}


def test_visible_gpus_come_from_the_environment_first(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "5, 7"}, tmp_path) == ["5", "7"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


@pytest.fixture
def two_nodes(tmp_path):
    """Folders of driver and kernel: GPUs at 3b:00 (cores 0-3, 8) and af:00 (cores 4-7), in PCI order."""
    driver, pci = tmp_path / "gpus", tmp_path / "devices"
    for address, uuid, cores in (("0000:3B:00.0", "GPU-aa01", "0-3,8\n"), ("0000:AF:00.0", "GPU-aa02", "4-7\n")):
        (driver / address).mkdir(parents=True)
        (driver / address / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: 1\n")
        (pci / address.lower()).mkdir(parents=True)
        (pci / address.lower() / "local_cpulist").write_text(cores)
    return driver, pci


def test_the_cores_of_a_gpu_are_those_of_its_node_by_number_and_by_uuid(two_nodes):
    assert local_cpus(["1", "0"], *two_nodes) == {"1": (4, 5, 6, 7), "0": (0, 1, 2, 3, 8)}
    assert local_cpus(["GPU-aa02"], *two_nodes) == {"GPU-aa02": (4, 5, 6, 7)}
    assert local_cpus(["GPU-aa", "2", "MIG-1"], *two_nodes) == {}, "not unique, not there, not known"


def test_a_list_of_cores_that_cannot_be_read_is_as_none(two_nodes):
    driver, pci = two_nodes
    (pci / "0000:af:00.0" / "local_cpulist").write_text("four\n")
    (pci / "0000:3b:00.0" / "local_cpulist").unlink()

    assert local_cpus(["0", "1"], driver, pci) == {}
    assert local_cpus(["0"], driver / "nothing", pci) == {}


def test_processes_get_the_cores_of_the_node_of_their_gpu():
    local = {"0": (0, 1, 2, 3), "1": (4, 5, 6, 7), "2": (0, 1, 2, 3)}

    devices = assign(config(), ["0", "1", "2"], range(1, 8), local)

    assert {f"{role}-{index}": (found.gpu, found.cpus) for (role, index), found in devices.items()} == {
        "trainer-0": ("0", (1,)),
        "rollout-0": ("1", (4, 5, 6, 7)),
        "rollout-1": ("2", (2, 3)),
    }


@pytest.mark.parametrize(
    "local",
    [{}, {"0": (0, 1), "1": (0, 1)}, {"0": (0, 1)}, {"0": (0, 1, 2), "1": (2, 3)}],
    ids=["unknown", "one node", "one is unknown", "overlap"],
)
def test_cores_are_shared_by_number_where_nodes_do_not_tell_more(local):
    devices = assign(config(), ["0", "1"], range(4), local)

    assert [found.cpus for found in devices.values()] == [(0, 1), (2, 3)]


def test_a_node_with_fewer_cores_than_processes_pins_none_of_them():
    local = {"0": (0,), "1": (1, 2, 3), "2": (0,)}

    devices = assign(config(), ["0", "1", "2"], range(4), local)

    assert [found.cpus for found in devices.values()] == [(), (1, 2, 3), ()]
