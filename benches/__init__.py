"""The measurements behind rlhfd's claims of speed: `bin/bench` measures, `benches/RESULTS.md` holds the results.

A module here is a benchmark with ``run(*, quick: bool) -> Sequence[Section]`` if `benches.__main__.BENCHES` names it.
`measure` interleaves the compared ways, `report` writes the results.
"""
