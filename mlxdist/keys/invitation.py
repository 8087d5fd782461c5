"""A code that lets other Macs join: for a few minutes, a few Macs and a few tries. No sockets and no clock."""

from dataclasses import dataclass, field

from mlxdist.keys.exchange import new_code

CODE_SECONDS = 300.0
MOST_TRIES = 5  # exchanges that were begun and did not end with the right code


@dataclass
class Invitation:
    """One code. Times are monotonic seconds.

    A try is taken when an exchange begins, and given back when it ends with the right code: exchanges at the same time,
    or broken off, give no one a try more, and cost this Mac no more than a few computations.
    """

    macs: int  # that may still join
    until: float
    code: str = field(default_factory=new_code)
    tries: int = MOST_TRIES

    def over(self, now: float) -> str:
        """Returns the reason why the code has ended; empty while it has not."""
        if self.macs <= 0:
            return "as many Macs as it was for have joined"
        if self.tries <= 0:
            return f"it was tried {MOST_TRIES} times with another code"
        return "its time is over" if now >= self.until else ""

    def begin(self, now: float) -> bool:
        """Takes a try for an exchange that begins. Returns False where the code has ended, or others use the rest."""
        if self.over(now):
            return False
        self.tries -= 1
        return True

    def joined(self, now: float) -> bool:
        """Notes the right code, which gives the try back. Returns False where the code has ended in the meantime."""
        if self.macs <= 0 or now >= self.until:
            return False
        self.tries += 1
        self.macs -= 1
        return True
