"""Tiered checkpoints: memory of the cluster first, durable second. See docs/design/tiers.md."""
