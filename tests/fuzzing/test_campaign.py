"""Commands on damaged files: the cases that were wrong once, and a share of drawn ones.

SUROGATE_FUZZ_CASES=<n> sets the number of these. A failure prints the seeds, and
`python tests/fuzzing/campaign.py SEED LOG` repeats one; the same script runs thousands. A seed that is mended joins
corpus.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fuzzing.campaign import KINDS, seeds_of

HERE = Path(__file__).parent
SHARE = int(os.environ.get("SUROGATE_FUZZ_CASES", 2 * len(KINDS)))


def test_a_text_names_seeds() -> None:
    assert seeds_of("5,17,100-102") == [5, 17, 100, 101, 102] and seeds_of("") == []


def test_the_corpus_and_a_share_of_drawn_cases_end_with_a_result_or_one_message(tmp_path: Path) -> None:
    lines = (HERE / "corpus.txt").read_text().splitlines()
    corpus = [line.split()[0] for line in lines if line and not line.startswith("#")]
    log = tmp_path / "log"
    named = ",".join([*corpus, f"1-{SHARE}"])
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "campaign.py"), named, str(log)],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    *wrong, summary = map(json.loads, log.read_text().splitlines())
    assert summary["done"] == len(corpus) + SHARE
    found = [case for case in wrong if "wrong" in case]
    assert not found, "\n\n".join(f"seed {case['seed']}: {case['words']}: {case['wrong']}" for case in found)
