"""File, environment and command line are merged as documented; paths, and the display of a configuration."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from pipeline.config import load as config_load
from pipeline.config.advice import toml
from pipeline.config.load import ConfigErrors, Origin, overridden
from pipeline.config.rewards import OwnReward
from pipeline.config.schema import Config

EMBEDDED = Path(__file__).parents[2] / "config.toml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestLayers:
    def test_embedded_file_holds_the_defaults(self) -> None:
        assert config_load.load(EMBEDDED, [], {}).config.model_copy(update={"daemon": None}) == Config().model_copy(
            update={"daemon": None}
        )
        daemon = config_load.load(EMBEDDED, [], {}).config.daemon
        assert daemon == Config().daemon.model_copy(
            update={"runtime_dir": EMBEDDED.parent / "run/rlhfd", "state_dir": EMBEDDED.parent / "state"}
        )

    def test_set_goes_before_environment_before_file_before_default(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers = 2\nthreads = 2\ntop_k = 2\n")
        environ = {"RLHFD_CONFIG": "c.toml", "RLHFD_ROLLOUT__THREADS": "3", "RLHFD_ROLLOUT__TOP_K": "3"}

        loaded = config_load.load(None, ["rollout.top_k=4"], environ)

        rollout = loaded.config.rollout
        assert (rollout.max_attempts, rollout.workers, rollout.threads, rollout.top_k) == (3, 2, 3, 4)
        assert loaded.path == Path("c.toml")
        assert loaded.origins == {
            "rollout.workers": Origin("file", "c.toml:2:11"),
            "rollout.threads": Origin("environment", "RLHFD_ROLLOUT__THREADS"),
            "rollout.top_k": Origin("set", "--set rollout.top_k"),
        }

    def test_named_file_goes_before_the_environments(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers = 2")

        assert config_load.load(Path("c.toml"), [], {"RLHFD_CONFIG": "other.toml"}).config.rollout.workers == 2

    def test_without_a_file_the_defaults_hold(self) -> None:
        loaded = config_load.load(None, [], {"PATH": "/bin", "RLHFD_TEST_SESSION": "1", "RLHFD_CONFIG": ""})

        assert loaded.config.rollout == Config().rollout and loaded.path is None and not loaded.origins

    def test_later_set_wins(self) -> None:
        assert config_load.load(None, ["rollout.workers=2", "rollout.workers=3"], {}).config.rollout.workers == 3

    def test_wrong_value_that_is_overridden_does_no_harm(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers = 0")

        assert config_load.load(Path("c.toml"), ["rollout.workers=1"], {}).config.rollout.workers == 1

    @pytest.mark.parametrize(
        ("assignment", "section", "key", "value"),
        [
            ("daemon.name=my-run", "daemon", "name", "my-run"),
            ("daemon.name=2026", "daemon", "name", "2026"),
            ('daemon.name="quoted"', "daemon", "name", "quoted"),
            (" rollout.workers = 3 ", "rollout", "workers", 3),
            ("rollout.devices=[0, 2]", "rollout", "devices", [0, 2]),
            ("rollout.devices=auto", "rollout", "devices", "auto"),
            ("rollout.stop_token_ids=7", "rollout", "stop_token_ids", 7),
            ("trainer.betas=[0.8, 0.9]", "trainer", "betas", (0.8, 0.9)),
            ("trainer.learning_rate=1e-5", "trainer", "learning_rate", 1e-5),
            ("trainer.clip_range=1", "trainer", "clip_range", 1.0),
            ("buffer.arena_bytes=2GiB", "buffer", "arena_bytes", 2 << 30),
            ("metrics.enabled=false", "metrics", "enabled", False),
            ("metrics.host=::1", "metrics", "host", "::1"),
            ("model.dtype=bfloat16", "model", "dtype", "bfloat16"),
        ],
    )
    def test_set_takes_toml_and_bare_strings(self, assignment: str, section: str, key: str, value: object) -> None:
        config = config_load.load(None, [assignment], {}).config

        assert getattr(getattr(config, section), key) == value


class TestPaths:
    @pytest.fixture
    def etc(self, folder: Path) -> Path:
        (folder / "etc").mkdir()
        return folder / "etc"

    def load(self, etc: Path, text: str, *sets: str, **environ: str) -> Config:
        (etc / "c.toml").write_text(text)
        return config_load.load(Path("etc/c.toml"), sets, environ).config

    def test_of_the_file_are_relative_to_its_folder(self, etc: Path) -> None:
        config = self.load(
            etc,
            '[daemon]\nruntime_dir = "r"\nstate_dir = "../s"\n[model]\nactor = "m/a"\nreward = "/abs"\n'
            '[prompts]\npath = "p.jsonl"',
        )

        assert config.daemon.runtime_dir == etc / "r"
        assert config.daemon.state_dir == etc.parent / "s"
        assert config.model.actor == str(etc / "m/a")
        assert config.model.reward == "/abs"
        assert config.prompts.path == str(etc / "p.jsonl")

    def test_of_the_http_server_are_paths_too(self, etc: Path) -> None:
        metrics = self.load(etc, '[metrics]\ntls_cert = "c.pem"\ntls_key = "k.pem"\ntoken_file = "t"').metrics

        assert (metrics.tls_cert, metrics.tls_key, metrics.token_file) == (etc / "c.pem", etc / "k.pem", etc / "t")

    def test_of_defaults_are_relative_to_the_files_folder(self, etc: Path) -> None:
        assert self.load(etc, "").daemon.runtime_dir == etc / "run/rlhfd"

    def test_of_defaults_without_a_file_are_relative_to_the_current_folder(self, folder: Path) -> None:
        assert config_load.load(None, [], {}).config.daemon.state_dir == folder / "state"

    def test_of_set_and_environment_are_relative_to_the_current_folder(self, etc: Path, folder: Path) -> None:
        config = self.load(etc, "", "model.actor=m", "daemon.state_dir=7", RLHFD_PROMPTS__PATH="p")

        assert config.model.actor == str(folder / "m")
        assert config.daemon.state_dir == folder / "7"
        assert config.prompts.path == str(folder / "p")

    def test_whose_bytes_are_no_utf8_are_errors_each_at_its_key(self, folder: Path) -> None:
        latin = Path(os.fsdecode(b"stra\xdfe"))
        latin.mkdir()
        (latin / "c.toml").write_text('[model]\nactor = "m"\n')

        with pytest.raises(ConfigErrors) as refused:
            config_load.load(latin / "c.toml", ["daemon.state_dir=/s"], {})

        ending = "are not UTF-8: rename its folder, or set LC_ALL=C.UTF-8 and leave PYTHONUTF8=0 out if it is UTF-8"
        assert {line.rpartition(" the bytes of ")[0] for line in refused.value.errors if ending in line} == {
            f"{latin}/c.toml:2:9: model.actor:", "daemon.runtime_dir:",
        }  # fmt: skip

    def test_home_is_understood(self, etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/me")

        assert self.load(etc, '[model]\nactor = "~/m"').model.actor == "/home/me/m"

    def test_builtin_and_functions_are_no_paths(self, etc: Path) -> None:
        config = self.load(etc, '[model]\nactor = "builtin:sort-digits"\n[[rewards]]\nname = "a.b:c"')

        assert config.model.actor == "builtin:sort-digits"
        assert config.model.reference is None
        assert config.rewards == [OwnReward(name="a.b:c")]

    def test_runtime_dir_variable_goes_before_the_file_and_gives_way_to_set(self, etc: Path, folder: Path) -> None:
        text = '[daemon]\nruntime_dir = "r"'
        both = {"RLHFD_RUNTIME_DIR": "v", "RLHFD_DAEMON__RUNTIME_DIR": "w"}

        assert self.load(etc, text, **both).daemon.runtime_dir == folder / "v"
        assert self.load(etc, text, "daemon.runtime_dir=s", **both).daemon.runtime_dir == folder / "s"


class TestRuntimeDirectory:
    def test_is_found_in_every_layer(self, folder: Path) -> None:
        (folder / "etc").mkdir()
        (folder / "etc/c.toml").write_text('[daemon]\nruntime_dir = "r"')
        path = Path("etc/c.toml")

        assert config_load.find_runtime_dir(None, {}) == folder / "run/rlhfd"
        assert config_load.find_runtime_dir(path, {}) == folder / "etc/r"
        assert config_load.find_runtime_dir(None, {"RLHFD_CONFIG": str(path)}) == folder / "etc/r"
        assert config_load.find_runtime_dir(path, {"RLHFD_DAEMON__RUNTIME_DIR": "w"}) == folder / "w"
        assert config_load.find_runtime_dir(path, {"RLHFD_RUNTIME_DIR": "v", "RLHFD_DAEMON__RUNTIME_DIR": "w"}) == (
            folder / "v"
        )

    @pytest.mark.parametrize("text", ["zzz = 1\n[rollout]\nworkers = 0", "daemon = 3", "[daemon]\nruntime_dir = 3"])
    def test_is_found_whatever_else_is_wrong(self, folder: Path, text: str) -> None:
        (folder / "c.toml").write_text(text)

        assert config_load.find_runtime_dir(Path("c.toml"), {}) == folder / "run/rlhfd"

    def test_of_a_file_that_is_no_toml_is_an_error(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[")

        with pytest.raises(ConfigErrors):
            config_load.find_runtime_dir(Path("c.toml"), {})


class TestRender:
    def test_only_what_was_set_is_shown(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers=2\n[daemon]\nname='x'")
        loaded = config_load.load(Path("c.toml"), ["buffer.arena_bytes=1MiB"], {})

        assert config_load.render(loaded, effective=False, origin=False) == (
            '[daemon]\nname = "x"\n\n[rollout]\nworkers = 2\n\n[buffer]\narena_bytes = 1048576\n'
        )

    def test_origin_is_a_comment(self, folder: Path) -> None:
        (folder / "c.toml").write_text("[rollout]\nworkers=2\n")
        loaded = config_load.load(Path("c.toml"), ["rollout.top_k=1"], {"RLHFD_ROLLOUT__TOP_P": "0.5"})

        assert config_load.render(loaded, effective=False, origin=True) == (
            "[rollout]\nworkers = 2  # c.toml:2:9\n"
            "top_p = 0.5  # RLHFD_ROLLOUT__TOP_P\ntop_k = 1  # --set rollout.top_k\n"
        )

    @pytest.mark.parametrize(
        "sets",
        [
            [],
            ["rollout.algorithm=ppo", "rollout.stop_token_ids=[[1], [2]]"],
            ["rollout.max_length=40"],
            ["rollout.max_length=40", "rollout.max_new_tokens=8"],
            ["rollout.max_prompt_length=40", "rollout.max_new_tokens=8"],
        ],
    )
    def test_effective_configuration_loads_again_as_the_same(self, folder: Path, sets: list[str]) -> None:
        (folder / "odd \" 'é\x7f").mkdir()
        loaded = config_load.load(None, [*sets, "daemon.state_dir=odd \" 'é\x7f"], {})
        (folder / "c.toml").write_text(config_load.render(loaded, effective=True, origin=True))

        again = config_load.load(Path("c.toml"), [], {})

        assert again.config.daemon == loaded.config.daemon
        for name in (
            "group_size",
            "sample_batch_size",
            "prompts_per_ticket",
            "row_bytes",
            "lengths",
            "rollout_kl_coef",
            "trainer_kl_coef",
        ):
            assert getattr(again.config, name) == getattr(loaded.config, name)
        assert config_load.render(again, effective=True, origin=False) == config_load.render(
            loaded, effective=True, origin=False
        )


def test_keys_of_the_file_that_something_above_it_overrides_are_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[rollout]\ntemperature = 0.5\nworkers = 2\n"
        "[trainer]\nlearning_rate = 1e-5\nmax_steps = 7\n[daemon]\nseed = 3\n"
    )
    sets = ["rollout.temperature=0.7", "trainer.max_steps=7", "daemon.name=a"]

    loaded = config_load.load(path, sets, {"RLHFD_TRAINER__LEARNING_RATE": "2e-5"})

    assert overridden(loaded) == {
        "rollout.temperature": "--set rollout.temperature",
        "trainer.learning_rate": "RLHFD_TRAINER__LEARNING_RATE",
    }


@pytest.mark.parametrize(
    "value",
    ["Be nice \N{GRINNING FACE}\nThink", "\x7f\x85\u2028 \\u0041", {"a.b": 1, "\u00e9": [2], "c d": {"e-f": "g"}}],
)
def test_a_value_in_toml_is_read_back_as_it_was(value: object) -> None:
    assert tomllib.loads(f"value = {toml(value)}") == {"value": value}
