"""The stacks that workers show: of real processes, and as texts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent import processes, stacks
from everstep.agent.progress import ProgressFile
from everstep.agent.stacks import StackFile
from everstep.worker.stacks import SIGNAL

SCRIPT = """
import sys, threading
from everstep.worker.progress import Progress
from everstep.worker.stacks import show_stacks

progress = Progress(sys.argv[1])
show_stacks(sys.argv[2], progress)

def train_step():
    print("ready", flush=True)
    while True:
        pass

threading.Thread(target=threading.Event().wait, daemon=True).start()
train_step()
"""

ANSWER = """\
Thread 0x00007f98b1b146c0 (most recent call first):
  File "/x/wire/channel.py", line 94 in receive

Current thread 0x00007f98d441bb80 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "/home/me/train.py", line 41 in train_step
  File "/home/me/train.py", line 60 in <module>
"""


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in an endless loop that shows its stacks in `stacks`."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    progress = ProgressFile(tmp_path, "run", 0, 1)
    command = [sys.executable, str(script), str(progress.path), str(tmp_path / "stacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert progress.glance().answers
        yield child
        child.kill()
    progress.remove()


def test_a_process_in_an_endless_loop_shows_where(
    looping: subprocess.Popen[str], tmp_path: Path
) -> None:
    file = StackFile(tmp_path / "stacks")
    for _ in range(2):  # the second answer is told from the first
        os.kill(looping.pid, SIGNAL)
        answers = asyncio.run(stacks.collect({3: file}))
        assert stacks.main_stack(answers[3])[0].function == "train_step"
        (line,) = stacks.group(answers, {})
        assert line.startswith("rank 3: in train_step at train.py:")
        assert answers[3].count("Current thread") == 1
    assert looping.poll() is None
    file.remove()
    assert not file.path.exists()


def test_a_stopped_process_does_not_answer(looping: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(looping.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, looping.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.is_stopped(looping.pid)
    assert not processes.is_traced(looping.pid)
    os.kill(looping.pid, SIGNAL)
    assert asyncio.run(stacks.collect({3: StackFile(tmp_path / "stacks")})) == {3: ""}
    os.kill(looping.pid, signal.SIGCONT)


def test_what_is_not_there_is_neither_stopped_nor_traced() -> None:
    assert not processes.is_stopped(1 << 30)
    assert not processes.is_traced(1 << 30)


def test_ranks_that_stand_alike_are_named_together() -> None:
    answers = {0: ANSWER, 1: "", 2: ANSWER, 3: ANSWER}
    assert stacks.group(answers, {4: "stopped"}) == (
        "ranks 0, 2, 3: in train_step at train.py:41, which called backward, now in "
        "_engine_run_backward at graph.py:979",
        "rank 1: did not answer in time: it is stuck in the kernel",
        "rank 4: stopped",
    )
    text = stacks.written(answers, ["one"])
    assert text.startswith("one\n\n==== rank 0\nThread")
    assert text.count("====") == 4


def test_a_stack_without_a_line_of_the_script() -> None:
    own = 'Current thread 0x1 (most recent call first):\n  File "<frozen runpy>", line 8 in run\n'
    assert stacks.group({0: own}, {}) == ("rank 0: in run at <frozen runpy>:8",)
