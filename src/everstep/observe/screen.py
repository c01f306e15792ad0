"""What everstep writes for people: lines, tables and a live line on one stream, drawn by rich.

Theory of operation. All that goes to the stream goes through one rich console, so that the live
line is taken away before anything is printed and drawn again below it. It is drawn when somebody
asks and by no thread. Where the stream is no terminal there is no live line, no width and, unless
it is asked for, no color: lines come out whole and tables are plain columns.

Text of others, a worker's line or an exception's message, is never read as markup. On a terminal
its colors are kept and every other control sequence is dropped, for one that moves the cursor would
tear the display apart.

A stream whose reader has gone is given up, and a character that its encoding lacks is escaped: a
run matters more than its display, and the journal and the logs have it all.

It does not know what the lines mean."""

from __future__ import annotations

import errno
import os
from typing import Literal, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.text import Text

_UNBOUNDED = 10_000  # columns of what is no terminal
_READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that hung up
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


class Screen:
    """A stream that people read. For one thread; writes block as the stream does.

    `color`: `always`, `never`, or `auto`: color on a terminal. The environment is not asked.
    """

    def __init__(self, stream: TextIO, color: str = "auto") -> None:
        terminal = stream.isatty()
        self._outlet = Outlet(stream)
        self._line = _Line()
        self._live: Live | None = None
        self._console = Console(
            file=cast("TextIO", self._outlet),
            force_terminal=terminal,
            force_jupyter=False,
            color_system=_color_system(color, terminal),
            no_color=False,
            width=None if terminal else _UNBOUNDED,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    @property
    def terminal(self) -> bool:
        """It is a terminal."""
        return self._console.is_terminal

    @property
    def interactive(self) -> bool:
        """It is a terminal on which a line can be drawn again."""
        return self._console.is_interactive

    def say(self, line: str, style: str = "") -> None:
        """A line of everstep's own, broken between words where a terminal is narrow."""
        self._console.print(_text(line, style), soft_wrap=not self.terminal)

    def put(self, line: str, style: str = "") -> None:
        """A line that stays whole, to be copied: a path, a traceback."""
        self._console.print(_text(line, style), soft_wrap=True)

    def relay(self, prefix: str, line: str) -> None:
        """A line of a worker, behind `prefix`. What is no terminal gets it as it came."""
        if not self.terminal:
            self._outlet.write(f"{prefix}{line}\n")
            self._outlet.flush()
            return
        self._console.print(Text.assemble((prefix, "dim"), _text(line)), soft_wrap=True)

    def draw(self, renderable: RenderableType) -> None:
        """A table, or whatever rich can draw."""
        self._console.print(renderable)

    def fits(self, renderable: RenderableType) -> bool:
        """Whether it can be drawn as wide as it would like to be."""
        unbounded = self._console.options.update_width(_UNBOUNDED)
        widest = Measurement.get(self._console, unbounded, renderable).maximum
        return widest <= self._console.width

    def live(self, line: str, *, now: bool = True) -> None:
        """Set the live line, and draw it `now` or below the next line. Nothing where none can be
        drawn."""
        if not self.interactive:
            return
        self._line.text = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(
                self._line,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._console.show_cursor(True)  # nobody would show it again if we were killed
        if now:
            self._live.refresh()

    def end_live(self) -> None:
        """Take the live line away, if there is one."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class Outlet:
    """The part of a text stream that rich and we need, kept from raising for its reader's sake."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write `text`; into nothing when the reader has gone. Other errors of the stream pass."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            return self._stream.write(shown)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush, as `write` writes."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor; raises OSError when it has none."""
        return self._stream.fileno()

    def _give_up(self, error: OSError) -> None:
        """Point the stream to /dev/null; the interpreter flushes it once more at its exit."""
        if error.errno not in _READER_GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)


class _Line:
    """The live line, as it is now whenever rich draws it."""

    def __init__(self) -> None:
        self.text = Text()

    def __rich__(self) -> Text:
        return self.text


def same_terminal(one: TextIO, other: TextIO) -> bool:
    """Whether two streams write to one terminal."""
    if not (one.isatty() and other.isatty()):
        return False
    try:
        return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except OSError:  # no descriptor behind it
        return one is other


def _text(line: str, style: str = "") -> Text:
    """A line with its colors and without any other control."""
    text = Text.from_ansi(line, style=style)
    plain = text.plain.translate(_CONTROLS)
    return text if plain == text.plain else Text(plain, style=style)


def _color_system(color: str, terminal: bool) -> Literal["auto", "standard"] | None:
    if color == "never" or (color == "auto" and not terminal):
        return None
    return "auto" if terminal else "standard"
