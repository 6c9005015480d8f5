"""How far a checkpoint is, on standard error: a bar on a terminal, a line a point elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Called with points done, points in all, and a line about the latest one.
ShowPoint = Callable[[int, int, str], None]


@contextlib.contextmanager
def progress_lines(shown: bool = True) -> Iterator[ShowPoint]:
    """A callable for after every point."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not shown:
        yield lambda *_: None
        return
    if not console.is_terminal:
        yield lambda done, total, line: console.print(f"{done}/{total}  {line}")
        return
    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=None)

        def show(done: int, total: int, line: str) -> None:
            bar.update(task, completed=done, total=total)
            bar.console.print(line)

        yield show
