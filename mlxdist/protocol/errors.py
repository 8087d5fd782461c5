"""The errors of mlxdist, one small tree.

    MlxdistError                 exit 1: the run could not go on
    ├── UserError                exit 2: wrong usage, configuration or data; nothing was trained
    │   ├── ConfigError          a key: which, what is wrong, what is allowed
    │   └── DataError            rows: file:line and the reason of each
    ├── WireError                bytes that are no message of ours
    ├── StaleError               a message of another incarnation, session, step or adapter version
    ├── MismatchError            a node that may not join: its name and both values
    ├── NodeError                a node that failed: its name, the cause, its last lines
    ├── NonFiniteError           NaN or Inf in a loss or gradient: the leaf and its rows
    └── SaveError                a file that could not be written: which, and what was kept

Every message says what, where and what to do.
"""


class MlxdistError(Exception):
    """An error that the run cannot recover from, with the command's exit code and the leaf that caused it, if any."""

    exit_code = 1

    def __init__(self, *message: object, leaf: int | None = None) -> None:
        super().__init__(*message)
        self.leaf = leaf


class UserError(MlxdistError):
    """An error that the user can fix, found before training time is spent."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key with a wrong name, type or value."""


class DataError(UserError):
    """Rows that cannot be trained on, each as file:line with its reason."""


class WireError(MlxdistError):
    """Bytes that are not a message of this protocol. The sender is at fault."""


class StaleError(MlxdistError):
    """A message of another incarnation, session, step or adapter version."""


class MismatchError(MlxdistError):
    """A node whose versions, model or manifest differ from the run's."""


class NodeError(MlxdistError):
    """A node that failed: its name, the cause and its last lines of output."""


class NonFiniteError(MlxdistError):
    """NaN or Inf in a loss or a gradient, caught before the optimizer."""


class SaveError(MlxdistError):
    """A file that could not be written; what was there before is kept.

    `what` says which, why and what is kept; `cure` what to do while the run goes on and tries again, as "free some
    space"; `remedy` the same as a sentence for a run that ends.
    """

    def __init__(self, what: str, remedy: str = "", cure: str = "check the disk") -> None:
        super().__init__(f"{what} {remedy}".strip())
        self.what, self.cure = what, cure
