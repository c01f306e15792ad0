"""What dead jobs have left in shared memory.

Does not know: how an owner's life is told; each kind of file does (progress.py, shelf.py).
"""

from __future__ import annotations

from pathlib import Path

from everstep.agent import progress, shelf


def sweep(shm_dir: Path, run_id: str = "") -> None:
    """Remove every file in which workers show where they stand, and every copy, that no living job
    holds; but the copies of the run `run_id` stay for its agents that come back."""
    progress.sweep(shm_dir)
    shelf.sweep(shm_dir, run_id)
