"""Coverage-guided fuzzing of the readers of binary files, by atheris, which no test needs.

    python tests/support/fuzz_readers.py recordio 200000    one reader, so many executions; more words go to libFuzzer
    python tests/support/fuzz_readers.py --list

A reader may give an answer or raise a UserError; anything else, more than 2 s or 3 GB ends it and leaves the input in
`crash-*`. Whatever it finds becomes a test with its payload. Of Arrow and PIL only what is Python is seen covered.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["trainkit.data", "pickletools"]):
    import binary_readers

from trainkit.errors import UserError  # noqa: E402


def main() -> None:
    if sys.argv[1:] in ([], ["--list"]):
        print(" ".join(binary_readers.READERS))
        return
    name, runs, more = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200_000, sys.argv[3:]
    read, corpus = binary_readers.READERS[name]
    seeds = binary_readers.SCRATCH / "corpus"
    seeds.mkdir()
    for number, data in enumerate(corpus()):
        (seeds / str(number)).write_bytes(data)

    def one(data: bytes) -> None:
        with contextlib.suppress(UserError):
            read(data)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = [f"-runs={runs}", "-max_len=4096", "-timeout=2", "-rss_limit_mb=3000", "-print_final_stats=1", *more]
    atheris.Setup([sys.argv[0], *words, str(seeds)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
