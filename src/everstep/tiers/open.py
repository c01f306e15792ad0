"""A durable store by its address."""

from __future__ import annotations

from pathlib import Path

from everstep.errors import UserError
from everstep.tiers.store import Store
from everstep.wire.bulk_throttle import UNLIMITED, Throttle

CLOUDS = ("s3://", "s3a://", "gs://", "az://", "azure://", "abfs://", "abfss://")


def open_store(url: str, *, throttle: Throttle = UNLIMITED) -> Store:
    """The durable store at `url`: a directory (also as `file:///...`), or a bucket and a prefix in
    an object store, `s3://bucket/prefix`, `gs://...`, `az://container/prefix`. Credentials, region
    and endpoint come from the environment. `throttle`: how fast it may send. Does not ask whether
    it is there. Raises UserError for an address that can't be one, or when obstore is missing."""
    if url.startswith(CLOUDS):
        from everstep.tiers.objects import open_bucket

        return open_bucket(url, throttle=throttle)
    from everstep.tiers.files import FileStore

    path = url.removeprefix("file://") if url.startswith("file:///") else url
    if not path or "://" in path:
        raise UserError(
            f"{url!r} is no destination for checkpoints: a directory, or s3://, gs:// or az:// "
            "with a bucket and a prefix"
        )
    return FileStore(Path(path), throttle=throttle)
