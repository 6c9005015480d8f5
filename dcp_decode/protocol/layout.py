"""Where the parts of a state lie: plain indices, computed in one place."""

from dcp_decode.protocol.rules import Size
from dcp_decode.protocol.steps import Step, Word


class Layout:
    """Indices into the tuples and masks of a state. The credit word of a pair of ranks follows its query words."""

    def __init__(self, size: Size, credit: bool) -> None:
        self.size = size
        self._query_words = size.words + credit
        self.cells = size.ranks**2 * (self._query_words + size.words + 1)
        """Mailbox words of one generation: query words, credit words, payload words and LSE words."""
        self._numbers_each = size.ranks * (2 + size.readers)
        self.numbers = size.ranks * self._numbers_each
        """CTAs that read a use number."""

    def cell(self, word: Word) -> int:
        """A word's index in generation 0."""
        query, ranks = self._query_words, self.size.ranks
        each, base = (self.size.words + 1, ranks**2 * query) if word.value else (query, 0)
        return base + (word.home * ranks + word.source) * each + word.index

    def number(self, step: Step) -> int:
        """The CTA of a step."""
        base = step.rank * self._numbers_each
        if step.stage == 1:
            return base + step.cta
        if step.stage == 3:
            return base + self.size.ranks + step.cta
        return base + 2 * self.size.ranks + step.peer * self.size.readers + step.cta

    def row(self, step: Step) -> int:
        """The row (stage 2) or slot (stage 3) of a step."""
        return step.rank * self.size.ranks + step.peer

    def group(self, step: Step) -> int:
        """The barrier of a row or slot: stage 2 first, then stage 3."""
        return self.row(step) + (self.size.ranks**2 if step.stage == 3 else 0)
