"""Errors, by who must act.

Every message says what happened, where (rank, node, step) and what to do. `exit_code` is what the
command line returns when the error ends it."""

from __future__ import annotations


class EverstepError(Exception):
    """Base of all errors that everstep raises on purpose."""

    exit_code = 1


class UserError(EverstepError):
    """The script, the command line or the configuration must be changed by its author."""

    exit_code = 2


class PeerError(EverstepError):
    """Another rank failed in a place that cannot be done again; nothing is wrong here."""


class TransientError(EverstepError):
    """Something outside failed and may succeed when tried again."""


class StateLost(EverstepError):
    """No living copy of a part of the state is left; the message names the part and what would have
    kept it."""
