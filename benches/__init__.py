"""What rlhfd's claims of speed rest on: `bin/bench` measures, `benches/RESULTS.md` holds what came out.

A module here is a benchmark with ``run(*, quick: bool) -> Sequence[Section]`` if `benches.__main__.BENCHES` names it.
`measure` interleaves what is compared, `report` writes the results.
"""
