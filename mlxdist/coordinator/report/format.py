"""Numbers as a person reads them: the same words on the terminal, in plain lines and in the events' messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.timeline import NodeWork
from mlxdist.coordinator.report.goodput import LostTime, Redone
from mlxdist.coordinator.report.node_states import TROUBLE


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, and the state of the cluster after it."""

    step: int  # 1-based
    total_steps: int | None  # None where only the time is limited
    metrics: Mapping[str, float]  # loss (the mean over total_weight) and TRL's names: rewards/…, logps/…, kl
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # supervised tokens of the step
    all_tokens: int  # all tokens of the step, without padding
    seconds: float  # of the wall clock
    peak_gb: float | None = None  # the highest of any node so far
    leaves_recomputed: int = 0  # since the coordinator started
    node_speeds: Mapping[str, float] = field(default_factory=dict)  # tokens per second, by node
    work: Mapping[str, NodeWork] = field(default_factory=dict)  # what each node did, by name
    advice: str | None = None  # one sentence for the person
    say_memory: bool = False  # train.report_memory: the peak is said on the terminal, too
    elapsed_seconds: float = 0.0  # of training up to the end of this step, over all sessions
    max_hours: float | None = None  # train.max_hours

    @property
    def loss(self) -> float:
        """The step's loss."""
        return self.metrics["loss"]

    @property
    def progress(self) -> float | None:
        """The share of the run that is done, in steps or in hours; None where no length is known."""
        if self.total_steps is not None:
            return min(self.step / self.total_steps, 1.0)
        return None if self.max_hours is None else min(self.elapsed_seconds / (3600 * self.max_hours), 1.0)

    @property
    def tokens_per_second(self) -> float:
        """Supervised tokens per second of the wall clock."""
        return self.tokens / self.seconds


def step_phrase(report: StepReport) -> str:
    """'step 10 of 100'."""
    return f"step {report.step}" + (f" of {report.total_steps}" if report.total_steps is not None else "")


def numbers_phrase(report: StepReport) -> str:
    """'loss 2.3456, 812 tokens/s, 2.4 s a step', with the accuracies of preferences where there are some."""
    parts = [f"loss {report.loss:.4f}"]
    if "rewards/accuracies" in report.metrics:
        parts.append(f"rewards/accuracies {report.metrics['rewards/accuracies']:.2f}")
    if report.say_memory and report.peak_gb is not None:
        parts.append(f"peak {report.peak_gb:.2f} GB")
    parts += [rate_phrase(report.tokens_per_second), f"{duration_phrase(report.seconds)} a step"]
    return ", ".join(parts)


def val_phrase(step: int, loss: float, metrics: Mapping[str, float]) -> str:
    """'validation after step 50: loss 1.2345, rewards/accuracies 0.75'."""
    numbers = [f"loss {loss:.4f}", *(f"{name} {value:.4g}" for name, value in metrics.items() if name != "loss")]
    return f"validation after step {step}: {', '.join(numbers)}"


def node_phrase(name: str, state: str, message: str) -> str:
    """'mini-1: dead, not heard for 15 s; 2 leaves go to others'; a state that adds nothing is left out."""
    parts = [state] if state in TROUBLE or not message else []
    return f"{name}: {', '.join([*parts, *([message] if message else [])])}"


def redone_phrase(step: int, redone: Redone) -> str:
    """'going on after step 40; 2 steps that were not saved are done again'."""
    if not redone.steps:
        return f"going on after step {step}"
    verbs = ("was", "is") if redone.steps == 1 else ("were", "are")
    return f"going on after step {step}; {count(redone.steps, 'step')} that {verbs[0]} not saved {verbs[1]} done again"


def lost_time_phrase(lost: LostTime) -> str:
    """'94 % of the time went into useful steps (goodput); 12 leaves recomputed, 31 s lost, 20 s of it paused'."""
    parts = []
    if lost.leaves_recomputed or lost.steps_disturbed:
        parts.append(f"{count(lost.leaves_recomputed, 'leaf', 'leaves')} recomputed")
    if lost.steps_again:
        parts.append(f"{count(lost.steps_again, 'step')} done again")
    if parts:
        parts.append(f"{duration_phrase(lost.seconds_lost)} lost")
    if lost.seconds_paused:
        parts.append(f"{duration_phrase(lost.seconds_paused)} of it paused")
    share = "" if lost.goodput is None else f"{100 * lost.goodput:.0f} % of the time went into useful steps (goodput)"
    return "; ".join(part for part in (share, ", ".join(parts) or "nothing was lost") if part)


def count(number: int, one: str, many: str = "") -> str:
    """'1 row', '8 rows'."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def hours_phrase(hours: float) -> str:
    """'1 hour', '0.5 hours', '8 hours'."""
    return f"{hours:g} hour{'' if hours == 1 else 's'}"


def rate_phrase(tokens_per_second: float) -> str:
    """'812 tokens/s'; one decimal below 10."""
    return f"{tokens_per_second:.{0 if tokens_per_second >= 10 else 1}f} tokens/s"


def duration_phrase(seconds: float) -> str:
    """'0.04 s', '0.4 s', '12 s', '3 min 05 s', '2 h 07 min'."""
    if seconds < 0.095:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def left_phrase(seconds: float | None) -> str:
    """', about 12 min left', coarse as an estimate should be; empty where there is nothing left or nothing known."""
    if not seconds:
        return ""
    whole = max(round(seconds), 1)
    if whole < 60:
        return f", about {whole} s left"
    return f", about {whole // 60} min left" if 600 <= whole < 3600 else f", about {duration_phrase(whole)} left"


def clock_phrase(seconds: float) -> str:
    """Time since the start in front of a line: '00:12', '1:02:03'."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"
