"""Mutated configurations: each is read, or refused with a place for every mistake."""

import random
import re

import pytest

from pipeline.config.load import ConfigErrors, load, render
from tests.fuzz.mutation import damaged

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(1800)]
_SHORT = 500
_FULL = 100_000
_WORDS = (
    "", "1", "-1", "0", "1e400", "nan", "inf", "true", '"x"', "[]", "[[", "{}", "{a={}}", "1979-05-27T07:32:00Z",
    "1GiB", "9" * 400, "0x" + "f" * 100, "'''", '"""', "\\u0000", "\x00", "é", "#", "=", "[daemon]", "[[daemon]]",
    "a.b.c = 1", "~", "~nobody/x", "../" * 50, "/dev/null", "builtin:", "auto", "[0, 0]", '["a:b"]', "-0.0", "1_0", "٣",
)  # fmt: skip


@pytest.fixture(scope="module")
def defaults():
    return render(load(None, [], {}), effective=True, origin=False)


def test_a_mutated_configuration_is_read_or_refused_with_its_place(request, tmp_path, defaults):
    rng = random.Random(request.config.getoption("randomly_seed", 0))
    path = tmp_path / "config.toml"
    keys = re.findall(r"^\[(\w+)\]|^(?:# )?(\w+)(?= = | is left out)", defaults, re.M)
    names, section = [], ""
    for table, key in keys:
        section = table or section
        names += [f"{section}.{key}"] if key else []
    total, refused, read = _FULL if request.config.getoption("--fuzz") else _SHORT, 0, 0
    for _ in range(total):
        # A part of the configuration: most of the time would go into keys that are not mutated.
        path.write_bytes(_mutated(rng, "\n".join(rng.sample(defaults.split("\n\n"), 2))))
        sets = [_assignment(rng, names) for _ in range(rng.randrange(3))]
        environ = {
            "RLHFD_" + name.replace(".", "__").upper(): text.replace("\0", "")
            for name, _, text in (_assignment(rng, names).partition("=") for _ in range(rng.randrange(3)))
        }
        try:
            render(load(path, sets, environ), effective=True, origin=True)
            read += 1
        except ConfigErrors as error:
            refused += 1
            assert_placed(error, path)

    assert refused > total // 4 and read > total // 100


def assert_placed(error, path):
    assert error.errors
    for line in error.errors:
        assert line.startswith((f"{path}:", "--set ", "RLHFD_")) and ": " in line, line


def _mutated(rng, text):
    if rng.random() < 0.1:
        return text.encode()
    if rng.random() < 0.3:
        return damaged(rng, text.encode())
    lines = text.splitlines()
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0]
        match rng.randrange(5):
            case 0:
                lines[at] = f"{key}= {rng.choice(_WORDS)}"
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                del lines[at]
            case 3:
                lines[at] = damaged(rng, lines[at].encode()[:200]).decode(errors="replace")
            case 4:
                lines[at] = f"{rng.choice(_WORDS)}{lines[at]}"
        lines = lines or [""]
    return "\n".join(lines).encode(errors="replace")


def _assignment(rng, names):
    name = rng.choice(names)
    if rng.random() < 0.2:
        name = damaged(rng, name.encode()).decode(errors="replace").replace("\0", "")[:80]
    return f"{name}={rng.choice(_WORDS)}"
