"""A virtual environment for each peer, under build/peers/, made on first use from PyPI.

All have the same torch as everstep's own. A stamp holds what was asked for, so that a change of it
installs anew. What can't be installed is `Unavailable`, with the last words of what failed.

Does not know how a peer is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import ROOT

TORCH = "torch==2.13.0"
_PLACE = ROOT / "build" / "peers"
_LIMIT_S = 900
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")

# NVRx's newest wheel is marked for Python 3.12 and a newer glibc than Debian 12's, where pip would
# take one that is a year older. It holds one compiled library, which a run without CUDA doesn't
# load. So it is asked for by those marks and put in place without its dependencies; of those, what
# the in-process restart imports is named here.
_NVRX = ("nvidia-resiliency-ext==0.7.0",)
_NVRX_MARKS = (
    *("--no-deps", "--only-binary", ":all:", "--implementation", "cp"),
    *("--python-version", "3.12", "--platform", "manylinux_2_39_x86_64"),
)
_NVRX_NEEDS = ("defusedxml", "httpx", "numpy", "nvidia-ml-py", "packaging", "psutil", "pyyaml")


class Unavailable(Exception):
    """A peer can't be had on this machine. Its text says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where programs are found."""

    bin: Path

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.bin / "python")

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """The versions installed there. Blocks for a second."""
        code = (
            "import importlib.metadata as m, json, sys;"
            "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
        )
        found = subprocess.run(
            [self.python, "-c", code, *packages], check=True, capture_output=True, text=True
        )
        result: dict[str, str] = json.loads(found.stdout)
        return result


def own() -> Environment:
    """The environment that runs this."""
    return Environment(Path(sys.executable).parent)


def torchft() -> Environment:
    """torchft's. Blocks for half a minute when it is not there. Raises Unavailable."""
    return _made("torchft", [[TORCH, "numpy", "torchft-nightly==2026.10.26"]], "torchft")


def nvrx() -> Environment:
    """NVRx's. Blocks for half a minute when it is not there. Raises Unavailable."""
    place = _PLACE / "nvrx"
    packages = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    newest = [*_NVRX_MARKS, "--upgrade", "--target", str(packages), *_NVRX]
    return _made("nvrx", [[TORCH, *_NVRX_NEEDS], newest], "nvidia_resiliency_ext.inprocess")


def _made(name: str, installs: Sequence[Sequence[str]], module: str) -> Environment:
    place = _PLACE / name
    environment = Environment(place / "bin")
    stamp, wanted = place / "installed.json", json.dumps(installs)
    if stamp.exists() and stamp.read_text() == wanted:
        return environment
    print(f"installing {name} into {place.relative_to(ROOT)}")
    steps = [[sys.executable, "-m", "venv", "--clear", str(place)]]
    steps += [[environment.python, *_PIP, *install] for install in installs]
    steps += [[environment.python, "-c", f"import {module}"]]
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{' '.join(step)} took more than {_LIMIT_S} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise Unavailable(f"{' '.join(step[1:4])} ...: {said[-1]}")
    stamp.write_text(wanted)
    return environment
