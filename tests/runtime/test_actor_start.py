"""The entry of an actor's process: the daemon's folder, search path and environment, and no other release's."""

import os
import pickle
import re
import sys

import pytest

from pipeline.config import user_modules
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.actor_start import ActorSpec, enter

CONFIG = Config.model_validate({"daemon": {"seed": 7}})


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The folder of the daemon's start; the changes of an entry to this process are undone."""
    folder, modules = tmp_path / "started", tmp_path / "configured"
    folder.mkdir(), modules.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(user_modules.FOLDER_VARIABLE, str(modules))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    return folder, modules


def arrived(**changes):
    """A specification made in this process, as it arrives in another one."""
    return pickle.loads(pickle.dumps(ActorSpec(config=CONFIG.model_dump_json(), **{"generation": 1, **changes})))


def test_an_actor_enters_the_folder_the_search_path_and_the_settings_of_the_daemon(tmp_path, started, monkeypatch):
    folder, modules = started
    spec = arrived()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(user_modules.FOLDER_VARIABLE, "")

    config = enter(spec)

    assert config == CONFIG
    assert os.getcwd() == str(folder)
    assert sys.path[-2:] == [str(modules), str(folder)]
    assert os.environ[user_modules.FOLDER_VARIABLE] == str(modules)
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["TOKENIZERS_PARALLELISM"]) == ("1", "false")


def test_a_folder_of_the_start_that_this_machine_lacks_is_not_entered(tmp_path, started):
    enter(arrived(working_directory=str(tmp_path / "not-here")))

    assert os.getcwd() == str(started[0])


def test_another_release_is_refused_before_it_reads_keys_that_it_may_not_know(started):
    spec = ActorSpec(config='{"a_key": "of tomorrow"}', release="0.0.7", generation=1)

    with pytest.raises(ConfigError, match=r"^rlhfd \S+ is installed, on the daemon's machine 0\.0\.7$"):
        enter(spec)


def test_the_lock_of_an_editor_is_no_code(started, tmp_path, monkeypatch):
    package = tmp_path / "pipeline" / "config"
    package.mkdir(parents=True)
    (package / "user_modules.py").write_text("a = 1\n")
    monkeypatch.setattr(user_modules, "__file__", str(package / "user_modules.py"))
    spec = arrived()
    (package / ".#user_modules.py").symlink_to("somebody@there.1")

    assert enter(spec) == CONFIG
    (package / "user_modules.py").write_text("a = 2\n")
    with pytest.raises(ConfigError, match=r"^the code of rlhfd is another one"):
        enter(spec)


def test_other_code_of_the_same_release_ends_the_first_start_and_is_told_later(started, caplog):
    """As of a checkout that one machine has not pulled: all of them are the same release."""
    told = r"^the code of rlhfd is another one \(\w{16}\) than on the daemon's machine \(of another commit\)"

    with pytest.raises(ConfigError, match=told):
        enter(arrived(code="of another commit"))

    assert enter(arrived(code="of another commit", generation=2)) == CONFIG
    assert re.match(told, caplog.messages[0])


def test_other_versions_of_the_libraries_are_told(started, caplog):
    here = ActorSpec(config="", generation=1).libraries

    enter(arrived())
    assert "numbers may differ" not in caplog.text

    enter(arrived(libraries={**here, "torch": "2.11.0"}))
    assert f"this machine has torch {here['torch']}, not 2.11.0 as the daemon's: numbers may differ" in caplog.text
