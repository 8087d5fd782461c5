"""Remarks on rows that are trained otherwise than a reader of the file expects: counted, one sentence per kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["unused", "removed", "inserted", "repeated", "prompt unread", "mark"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing to say of one row or turn."""

    kind: Kind
    what: str = ""  # the field, the part of a turn or the text that it is about
    cure: str = ""  # the chat template's argument that changes it, as `name = true`


@dataclass
class Tally:
    """The remarks on all rows of a file."""

    rows: Counter[Remark] = field(default_factory=Counter)  # rows with the remark
    times: Counter[Remark] = field(default_factory=Counter)  # how often, over all rows

    def add(self, remarks: Sequence[Remark]) -> None:
        """Count the remarks on one row."""
        self.rows.update(set(remarks))
        self.times.update(remarks)

    def sentences(self, n_rows: int) -> list[str]:
        """Returns the sentences on a file of `n_rows` rows, at most one per kind."""
        makers = (self._unused, self._changed, self._repeated, self._unread, self._marks)
        return [said for make in makers if (said := make(n_rows))]

    def _of(self, *kinds: Kind) -> list[Remark]:
        return [remark for remark in self.rows if remark.kind in kinds]

    def _share(self, remark: Remark, n_rows: int) -> str:
        return f"{self.rows[remark]} of {n_rows} rows, {percent(self.rows[remark], n_rows)}"

    def _unused(self, n_rows: int) -> str:
        found = [f"{remark.what} ({self._share(remark, n_rows)})" for remark in self._of("unused")]
        return f"The chat template does not show {listed(found)}: nothing of that is read or trained." if found else ""

    def _changed(self, n_rows: int) -> str:
        parts = []
        for remark in self._of("removed", "inserted"):
            turns = "1 trained turn" if self.times[remark] == 1 else f"{self.times[remark]} trained turns"
            verb = "removes {} from" if remark.kind == "removed" else "inserts {} into"
            cure = f"data.chat_template_kwargs = {{{remark.cure}}} changes that" if remark.cure else ""
            cure = cure or "no argument of the template changes that"
            parts.append(f"{verb.format(remark.what)} {turns} ({self._share(remark, n_rows)}; {cure})")
        return f"The chat template {listed(parts)}: the turns are trained as the template shows them." if parts else ""

    def _repeated(self, n_rows: int) -> str:
        found = [self._share(remark, n_rows) for remark in self._of("repeated")]
        return f"Responses repeat the prompt ({found[0]}): the repetition is not trained." if found else ""

    def _unread(self, n_rows: int) -> str:
        found = [self._share(remark, n_rows) for remark in self._of("prompt unread")]
        return (
            f"The text of prompt is not read where both conversations share another prompt ({found[0]})."
            if found
            else ""
        )

    def _marks(self, n_rows: int) -> str:
        found = [self._share(remark, n_rows) for remark in self._of("mark")]
        said = "Marks that ask to train a turn of another role than the assistant have no effect"
        return f"{said} ({found[0]})." if found else ""


def percent(part: int, whole: int) -> str:
    """'3 %', '0.2 %' below one."""
    share = 100 * part / whole
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def listed(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
