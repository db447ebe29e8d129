from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import service, systemd_units
from pipeline.cli.collect_env import collect
from pipeline.cli.main import main
from pipeline.cli.systemd_units import Unit, plan, shipped, verify
from pipeline.config.load import CONFIG_VARIABLE
from pipeline.errors import ConfigError
from pipeline.telemetry.log_file import LogFile, path_in

SHIPPED = systemd_units.SHIPPED.read_text()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "grpo.toml"
    path.write_text('[daemon]\nstate_dir = "state"\n')
    return path


@pytest.mark.needs("systemd-analyze")
def test_the_unit_as_shipped_is_exposed_no_more_than_2() -> None:
    found = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", str(systemd_units.SHIPPED)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stdout[-200:] + found.stderr
    assert re.search(r"Overall exposure level for \S+: 1\.\d OK", found.stdout)


def test_the_unit_of_an_instance_has_its_name_in_each_of_its_folders() -> None:
    one, instance = shipped(Unit()).splitlines(), shipped(Unit("b")).splitlines()

    changed = [line for line, other in zip(instance, one, strict=True) if line != other]
    assert changed == [
        "Description=rlhfd, RLHF training (%i)",
        "Environment=RLHFD_CONFIG=/etc/rlhfd/%i.toml",
        "Environment=RLHFD_DAEMON__RUNTIME_DIR=%t/rlhfd-%i RLHFD_DAEMON__STATE_DIR=%S/rlhfd-%i",
        "Environment=HOME=%C/rlhfd-%i",
        "RuntimeDirectory=rlhfd-%i",
        "StateDirectory=rlhfd-%i",
        "CacheDirectory=rlhfd-%i",
    ]


def test_nothing_that_a_gpu_run_needs_is_taken_away() -> None:
    settings = dict(line.split("=", 1) for line in SHIPPED.splitlines() if re.match(r"[A-Z]\w+=", line))

    for taking in ("MemoryDenyWriteExecute", "PrivateDevices", "DeviceAllow", "ProtectClock", "ProcSubset"):
        assert taking not in settings
    assert "AF_NETLINK" in settings["RestrictAddressFamilies"]
    assert settings["LimitMEMLOCK"] == "infinity" and settings["RemoveIPC"] == "no"
    assert settings["RestartPreventExitStatus"].split() == ["2", "70", "78"]
    # As root and outside of the hardening (+); a machine without a GPU has no such program (-).
    assert settings["ExecStartPre"] == "+-/usr/bin/nvidia-modprobe -u -c=0"
    assert "nvidia-fabricmanager.service" in settings["After"].split()


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("instance", [None, "b"])
def test_units_of_this_installation_name_its_program_and_configuration(config: Path, instance: str | None) -> None:
    planned = plan(Unit(instance), config, "root", {"RLHFD_ROLLOUT__WORKERS": "3"})
    verify(planned)
    text = planned.text

    program = Path(sys.executable).with_name("rlhfd")
    assert f"ExecStart={program} start\n" in text and f"ExecReload={program} reload\n" in text
    assert f"RLHFD_CONFIG={config}\n" in text and f"WorkingDirectory={config.parent}\n" in text
    assert "User=root\n" in text
    # The configuration lies where PrivateTmp would hide it.
    assert "PrivateTmp=no\nReadWritePaths=/tmp /var/tmp\n" in text
    notes = "\n".join(planned.notes)
    assert f"{config}:2:13: daemon.state_dir is not in force under systemd: /var/lib/rlhfd" in notes
    assert "RLHFD_ROLLOUT__WORKERS is set here and not passed to the service" in notes
    assert "PrivateTmp=no, not yes: the service could not see /tmp/" in notes


@pytest.mark.needs("systemd-analyze")
def test_the_unit_of_a_checkout_in_a_ready_environment_runs_that_checkout(config: Path) -> None:
    planned = plan(Unit(), config, "root", {"RLHFD_VENV": "ready"})
    verify(planned)

    program = Path(systemd_units.__file__).parents[2] / "bin" / "rlhfd"
    assert f"ExecStart={program} start\n" in planned.text and f"ExecReload={program} reload\n" in planned.text
    assert f"Environment=RLHFD_CONFIG={config} RLHFD_VENV={sys.prefix}\n" in planned.text


@pytest.mark.parametrize("is_link", [False, True])
def test_a_ready_environment_stays_visible_and_so_does_the_folder_to_which_it_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path, is_link: bool
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "venv").mkdir(parents=True)
    (tmp_path / "link").symlink_to(hidden / "venv")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link" if is_link else hidden / "venv"))
    # As if the interpreter lay elsewhere, as that of a virtual environment does.
    monkeypatch.setitem(systemd_units._HIDING, "PrivateTmp=yes", ("PrivateTmp=no", (hidden,)))

    planned = plan(Unit(), config, "root", {"RLHFD_VENV": "ready"})

    assert "\nPrivateTmp=no\n" in planned.text
    assert f"PrivateTmp=no, not yes: the service could not see {hidden}/venv" in planned.notes


def test_a_configuration_behind_a_link_stays_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "other.toml").write_text(config.read_text())
    (tmp_path / "link").symlink_to(hidden)
    monkeypatch.setitem(systemd_units._HIDING, "PrivateTmp=yes", ("PrivateTmp=no", (hidden,)))

    assert "\nPrivateTmp=yes\n" in plan(Unit(), config, "root", {}).text
    assert "\nPrivateTmp=no\n" in plan(Unit(), tmp_path / "link" / "other.toml", "root", {}).text


def test_folders_that_are_not_in_force_are_not_checked(config: Path) -> None:
    (config.parent / "state").write_text("")

    planned = plan(Unit(), config, "root", {})

    assert any("is not in force under systemd: /var/lib/rlhfd is" in note for note in planned.notes)


def test_a_start_of_a_service_has_the_time_to_check_millions_of_prompts() -> None:
    # systemd hears nothing of a start before its prompts are checked: some 100 us a prompt.
    limit_s = float(re.findall(r"^TimeoutStartSec=(\d+)$", SHIPPED, re.MULTILINE)[0])

    assert limit_s / 100e-6 >= 5e6


def test_a_python_below_a_home_directory_stays_visible(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    home = config.parent.parent
    monkeypatch.setitem(systemd_units._HIDING, "ProtectHome=yes", ("ProtectHome=read-only", (home,)))

    planned = plan(Unit(), config, "root", {})

    assert "\nProtectHome=read-only\n" in planned.text
    assert any("ProtectHome=read-only, not yes" in note for note in planned.notes)


def test_a_service_in_a_cluster_sees_the_sockets_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As if nothing else of this test lay below /tmp.
    monkeypatch.setitem(systemd_units._HIDING, "PrivateTmp=yes", ("PrivateTmp=no", (Path("/tmp/ray"),)))
    path = tmp_path / "grpo.toml"
    for engine, expected in (("local", "yes"), ("ray", "no")):
        path.write_text(f'[cluster]\nengine = "{engine}"\n')
        assert f"\nPrivateTmp={expected}\n" in plan(Unit(), path, "root", {}).text


@pytest.mark.needs("systemd-analyze")
def test_a_key_that_systemd_does_not_know_is_refused(config: Path) -> None:
    planned = plan(Unit(), config, "root", {})

    with pytest.raises(ConfigError, match="KilMode"):
        verify(dataclasses.replace(planned, text=planned.text.replace("KillMode=", "KilMode=")))


def test_what_cannot_be_installed_is_refused_with_its_reason(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no user rlhfd-nobody"):
        plan(Unit(), config, "rlhfd-nobody", {})
    with pytest.raises(ConfigError, match="--user is empty: "):
        plan(Unit(), config, "", {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65533)
        with pytest.raises(ConfigError, match="has the number 65533 and no name: give one"):
            plan(Unit(), config, None, {})
    with pytest.raises(ConfigError, match="must be of letters"):
        Unit("../b")
    config.write_text("[daemon]\nstate_dirr = 1\n")
    with pytest.raises(ConfigError, match="did you mean state_dir"):
        plan(Unit(), config, "root", {})
    config.write_text("")
    monkeypatch.setattr(sys, "executable", str(config.parent / "python"))
    with pytest.raises(ConfigError, match=f"there is no {config.parent}/rlhfd: install rlhfd into it"):
        plan(Unit(), config, "root", {})


def test_an_instance_without_a_file_yet_is_told_where_to_write_it() -> None:
    planned = plan(Unit("not-there"), None, "root", {CONFIG_VARIABLE: "/elsewhere.toml"})

    assert planned.config == Path("/etc/rlhfd/not-there.toml")
    assert "Environment=RLHFD_CONFIG=/etc/rlhfd/not-there.toml\n" in planned.text
    assert "/etc/rlhfd/not-there.toml does not exist yet: write it before the start" in planned.notes


def test_a_unit_is_known_by_its_runtime_directory() -> None:
    for unit in (Unit(), Unit("b"), Unit("a-b")):
        assert Unit.of_runtime_dir(unit.runtime_dir) == unit
    for other in ("/run/other", "/srv/rlhfd", "/run/rlhfd/b"):
        assert Unit.of_runtime_dir(Path(other)) is None


def test_a_unit_that_cannot_be_written_is_printed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_units, "UNIT_DIR", config.parent / "none")

    ran = CliRunner().invoke(main, ["systemd", "install", "--config", str(config)])
    printed = CliRunner().invoke(main, ["systemd", "unit", "--config", str(config)])

    assert ran.exit_code == 1
    assert (
        f"{config.parent}/none/rlhfd.service: No such file or directory; root installs a unit, `rlhfd systemd unit`"
        in ran.output
    )
    assert printed.exit_code == 0, printed.output
    assert f"# {config.parent}/none/rlhfd.service\n{plan(Unit(), config, None, os.environ).text}" == printed.stdout


# rlhfd logs


def test_logs_of_an_instance_that_has_ended_are_found_by_its_configuration(config: Path) -> None:
    log = LogFile(path_in(config.parent / "state"), 1 << 20)
    for process in ("supervisor", "rollout-0", "rollout-1", "buffer-0"):
        log.append(f"2026-11-21T07:30:01.250Z INFO {process} x: from {process}")
    log.close()

    def shown(*words: str) -> str:
        found = CliRunner().invoke(main, ["logs", *words, "--config", str(config)])
        assert found.exit_code == 0, found.output
        return " ".join(line.rsplit(maxsplit=1)[1] for line in found.output.splitlines())

    assert shown() == "supervisor rollout-0 rollout-1 buffer-0"
    assert shown("rollout") == "rollout-0 rollout-1"
    assert shown("rollout-1") == "rollout-1"
    assert shown("buffer", "-n", "1") == "buffer-0"


def test_logs_of_a_services_folder_are_a_file_where_systemd_does_not_run_the_machine(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in an image, of an instance that has ended.
    monkeypatch.setenv("RLHFD_DAEMON__RUNTIME_DIR", "/run/rlhfd-none")
    found = {}
    for name, place in (("systemd", config.parent), ("other", config.parent / "none")):
        monkeypatch.setattr(service, "_SYSTEMD", place)
        found[name] = service._destination(config, None)

    assert found == {"systemd": "journal:rlhfd@none.service", "other": f"{config.parent}/state/log/rlhfd.log"}


def test_logs_that_are_not_there_are_exit_3_with_the_reason(config: Path, tmp_path: Path) -> None:
    none = CliRunner().invoke(main, ["logs", "--config", str(config)])
    elsewhere = CliRunner().invoke(main, ["logs", "--config", str(config), "--runtime-dir", str(tmp_path / "other")])

    assert (none.exit_code, elsewhere.exit_code) == (3, 3)
    assert "there is no log yet" in none.output and "name its configuration" in elsewhere.output


def test_a_configuration_that_is_right_on_gpus_alone_is_read_as_a_start_on_them_reads_it(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        '[model]\nactor = "m"\n[prompts]\npath = "p.jsonl"\n[trainer]\nimportance_correction = "token"\n'
        '[rollout]\nengine = "vllm"\nquantization = "fp8"\n[[rewards]]\nname = "m:f"\n'
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(systemd_units, "visible_gpus", lambda environ: ["0"])
    monkeypatch.setattr(systemd_units, "problems_of_files", lambda *_, **_unused: [])

    logs = CliRunner().invoke(main, ["logs", "--config", str(config)])
    report = collect(config, (), {"CUDA_VISIBLE_DEVICES": "0"}, None)

    assert plan(Unit(), config, None, {}).config == config
    assert logs.exit_code == 3 and "there is no log yet" in logs.output
    assert 'engine = "vllm"' in str(report["configuration"]) and "must be" not in str(report["configuration"])
