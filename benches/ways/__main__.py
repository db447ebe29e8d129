"""The consumer's process of one way: ``python -m benches.ways NAME PRODUCERS``."""

import sys

from benches.ways import serve

if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
