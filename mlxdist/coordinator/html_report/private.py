"""Texts of a run without what concerns only its owner: absolute paths keep their last part, addresses nothing."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = re.compile(r"(?<![\w/.:~-])~?(?:/[^\s/'\"`,;:()<>|]+){2,}/?")
ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])|\[?\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,}"
)
LONG = 160  # characters of a value


class Private:
    """Cleans texts. `folders`: absolute paths that may stand in them with spaces; those above them are found too."""

    def __init__(self, folders: Sequence[Path]) -> None:
        above = {parent for folder in folders for parent in (folder, *folder.parents) if len(parent.parts) > 2}
        self._known = sorted((str(each) for each in above), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Returns a text with only the last part of each path."""
        for known in self._known:
            text = text.replace(known, Path(known).name)
        return ADDRESS.sub("…", PATH.sub(lambda match: Path(match[0]).name, text))

    def value(self, value: Any) -> Any:
        """Returns a setting as it is shown; a long text is cut."""
        match value:
            case str():
                shown = self.text(value)
                return shown if len(shown) <= LONG else f"{shown[:LONG]}… ({len(shown):,} characters)"
            case list():
                return [self.value(each) for each in value]
            case dict():
                return {key: self.value(each) for key, each in value.items()}
        return value
