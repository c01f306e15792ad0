"""Kill agents and savers at random moments of saves in memory, one at a time, and see after each
that the newest checkpoint that was said to be committed, or a newer one, is whole for ranks of both
hosts.

    python tests/scripts/kill_memory.py KILLS SEED
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.integration.test_memory_agent import Lab, Saver, look, until


def main() -> None:
    kills, draw = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    killed: Counter[str] = Counter()
    failed = 0
    gate = threading.Event()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        lab = Lab(Path(folder))
        try:
            lab.start("a")
            lab.start("b", "--peers", lab.where["a"])
            saver, top = Saver(lab, 0), 0
            for _ in range(kills):
                seen = saver.newest
                until(partial(saver.is_beyond, seen))
                gate.wait(draw.random() * 0.06)  # a moment of the saves after that
                victim = draw.choice(["saver", "saver", "a", "b"])
                killed[victim] += 1
                if victim == "saver":
                    saver.kill()
                    failed += len(saver.failed)
                else:
                    lab.end(victim, signal.SIGKILL)
                    lab.start(victim, "--peers", lab.where["b" if victim == "a" else "a"])
                top = max(look(lab, name, saver.newest) for name in "ab")
                if victim == "saver":
                    saver = Saver(lab, top)
        finally:
            lab.close()
    print(f"killed {dict(killed)}; {top} steps, none that was committed was lost; {failed} failed")


if __name__ == "__main__":
    main()
