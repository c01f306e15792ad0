"""A checkpoint that proved corrupt, put aside, so that its step can be saved again.

Theory of operation. A step is saved once. A training that fell to an older step, as the newest was
corrupt, comes to that step again, and could never save it. So who decides for all looks at the part
that was lost: where it is missing, or its bytes are not those that were saved, the tier's record is
set aside. A tier that only can't be asked, or whose record is not to be believed, stays as it is:
that is for a person.

It does not know torch, nor who loads.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.snapshot import block_spans
from everstep.tiers.catalog import Checkpoint, check_block
from everstep.tiers.find import Tier
from everstep.tiers.load import PartLost
from everstep.tiers.names import Attempt
from everstep.tiers.series import Series
from everstep.tiers.store import Missing, Refused, StoreError


def set_aside(tiers: Sequence[Tier], lost: PartLost, *, deadline_s: float) -> list[str]:
    """Set aside the records of `lost.step` in those tiers in which the lost part is bad. Returns
    what was done, in words. Blocks for reading the part. Raises nothing of the stores'."""
    said = []
    for tier in tiers:
        series = tier.series
        if not isinstance(series, Series):
            continue
        try:
            checkpoint = series.read(lost.step, deadline_s=deadline_s)
            if not _is_bad(series, checkpoint, lost.rank, deadline_s):
                continue
            series.set_aside(checkpoint, deadline_s=deadline_s)
        except StoreError as error:
            if not isinstance(error, Missing):
                said.append(f"step {lost.step} in {tier.name} stays as it is: {error}")
        else:
            said.append(f"step {lost.step} in {tier.name} was set aside: it can be saved again")
    return said


def _is_bad(series: Series, checkpoint: Checkpoint, rank: int, deadline_s: float) -> bool:
    """Whether a part is missing or corrupt, as far as the store can say. Raises StoreError where it
    can't."""
    attempt = Attempt(series=checkpoint.series, step=checkpoint.step, name=checkpoint.attempt)
    try:
        manifest = series.part_manifest(checkpoint, rank, deadline_s=deadline_s)
        held = manifest.snapshot
        for index, (start, end) in enumerate(block_spans(held.nbytes, held.block_bytes)):
            data = series.store.get(
                attempt.part(rank, "safetensors"), start=start, end=end, deadline_s=deadline_s
            )
            check_block(manifest, index, memoryview(data), signed=bool(manifest.block_sha256))
    except (Missing, Refused):
        return True
    return False
