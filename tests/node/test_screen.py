"""The line that a person sees on a Mac that has joined."""

from mlxdist.macos import limit_of
from mlxdist.node.screen import line
from mlxdist.protocol.messages import HeartbeatAck, SessionId

SESSION = SessionId("run", 1, "1")
THERM = """Note: No thermal warning level has been recorded
CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 70
"""


def test_the_line_says_for_whom_how_much_and_how_to_leave() -> None:
    standing = HeartbeatAck(SESSION, 1234.5, 0.312, 5_200_000_000)
    shown = line("mini-1.local:7550", standing, 100)
    assert shown == "works for mini-1.local:7550: 31 % of a step, 1,234 tokens/s, 5.2 GB; Ctrl-C leaves"
    assert "slowed to 70 % by its heat" in line("mini-1", standing, limit_of(THERM))
    assert "5.2 GB, heavy thermal pressure;" in line("mini-1", standing, None, heat="heavy")
    assert line("mini-1", standing, None, heat="nominal") == line("mini-1", standing, None)


def test_a_model_on_its_way_is_shown_with_its_share() -> None:
    shown = line("mini-1", HeartbeatAck(SESSION), None, (450_000_000, 1_200_000_000))
    assert shown == "gets the model from mini-1: 37 % of 1.20 GB; Ctrl-C leaves"


def test_what_is_not_known_is_left_out() -> None:
    assert line("mini-1", HeartbeatAck(SESSION), None) == "works for mini-1: getting ready; Ctrl-C leaves"
    assert line("mini-1", None, None) == "waits for a run of mini-1"
    assert limit_of("") is None
    assert limit_of("CPU_Speed_Limit = fast") is None
