"""Types of the fields of messages, each with the most that it may hold. A peer that sends more is refused undecoded."""

from typing import Annotated, Literal

from msgspec import Meta

MOST_LINES = 256  # of a log message
LINE_CHARS = 4096
SENTENCE_CHARS = 8192
MOST_ROWS = 65_536  # of a leaf

Name = Annotated[str, Meta(max_length=128)]
Word = Annotated[str, Meta(max_length=64)]
ModelName = Annotated[str, Meta(max_length=1024)]
Line = Annotated[str, Meta(max_length=LINE_CHARS)]
Sentence = Annotated[str, Meta(max_length=SENTENCE_CHARS)]
Secret = Annotated[str, Meta(max_length=32)]

Heat = Literal["", "nominal", "moderate", "heavy", "trapping", "sleeping"]  # a Mac's thermal pressure; "": unknown

Index = Annotated[int, Meta(ge=-1, lt=2**31)]  # of a step, leaf, attempt, row; -1: none
Amount = Annotated[int, Meta(ge=-1, lt=2**40)]  # of elements, or bytes
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # nanoseconds
Pid = Annotated[int, Meta(ge=0, lt=2**31)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]
Beat = Annotated[float, Meta(ge=0.01, le=3600.0)]  # seconds; a shorter one would keep a processor busy
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Value = Annotated[float, Meta(ge=-1e300, le=1e300)]
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Facts = Annotated[dict[Word, Annotated[str, Meta(max_length=256)]], Meta(max_length=32)]  # on a host or its packages
Lines = Annotated[tuple[Line, ...], Meta(max_length=MOST_LINES)]
Names = Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=1024)]
Digests = Annotated[tuple[Name, ...], Meta(max_length=8)]
Shape = Annotated[tuple[Index, ...], Meta(max_length=8)]
Rows = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...], Meta(max_length=MOST_ROWS)]
Floats = Annotated[tuple[float, ...], Meta(max_length=MOST_ROWS)]
RowInputs = Annotated[dict[Word, Floats], Meta(max_length=16)]
Scalars = Annotated[dict[Word, Value], Meta(max_length=64)]
Fixed = Annotated[dict[Word, ModelName | Number | Value], Meta(max_length=128)]
