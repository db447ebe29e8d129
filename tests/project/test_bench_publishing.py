"""The benchmark of a publish beside training takes steps of the trainer as it is."""

from benches.publishing import measured
from benches.sharding import SMALL


def test_each_way_takes_its_steps_and_is_told_after_its_page_is_turned(tmp_path):
    shape = SMALL._replace(hidden=64, inner=64, layers=1, vocabulary=64, rows=8, tokens=16)

    (table,) = measured(tmp_path, shape, rounds=1).tables

    names, *_, seen, told = zip(*table.rows, strict=True)
    assert len(names) == 4 and names[0] == "in place"
    assert all(0 < seconds(before) <= 1.01 * seconds(after) for before, after in zip(seen, told, strict=True))


def seconds(figure):
    return float(figure.removesuffix(" s"))
