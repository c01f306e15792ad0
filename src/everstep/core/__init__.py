"""Decisions as pure functions: no clock, no socket, no process, no torch.

`handle(event, now) -> [action]` is the whole surface; shells carry the actions out.
"""
