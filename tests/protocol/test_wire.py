"""The wire format: what one side encodes the other reads, and everything else is refused as WireError."""

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.protocol import limits, wire
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.messages import PROTOCOL_VERSION, Message
from mlxdist.protocol.wire import MAGIC, MAX_HEADER, MAX_PAYLOAD, PREAMBLE, decode, encode, fitted
from tests.protocol.example_messages import ANY_MESSAGE, EXAMPLES, MESSAGE_TYPES, all_message_classes, hints

SESSION = m.SessionId("run", 1, "2")
PAYLOAD = bytes(range(256)) * 2

each_example = pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)


def frames_of(message: Message, payload: bytes = b"") -> list[bytes]:
    return [bytes(frame) for frame in encode(message, payload)]


def with_header(header: bytes) -> list[bytes]:
    """A message of ours but for its header."""
    return [PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, 0, 0), header, b""]


def header_of(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(fields)


def as_map(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(frames_of(message)[1])
    return fields


def refused(frames: Sequence[Any]) -> str:
    with pytest.raises(WireError) as caught:
        decode(frames)
    return str(caught.value)


# ---- what is ours goes through


def test_the_union_names_every_message() -> None:
    assert set(MESSAGE_TYPES) == set(all_message_classes())
    assert len({kind.__struct_config__.tag for kind in MESSAGE_TYPES}) == len(MESSAGE_TYPES)


def test_every_message_but_the_first_and_the_refusal_names_its_session() -> None:
    assert {kind for kind in MESSAGE_TYPES if "session" not in hints(kind)} == {m.Register, m.Reject}


def test_messages_cannot_be_changed() -> None:
    for message in EXAMPLES:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(message, message.__struct_fields__[0], None)


@each_example
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_every_message_arrives_as_it_was_sent(message: Message, buffer: type) -> None:
    arrived, payload = decode([buffer(bytes(frame)) for frame in encode(message, PAYLOAD)])
    assert type(arrived) is type(message)
    assert arrived == message
    assert payload.tobytes() == PAYLOAD


@given(ANY_MESSAGE, st.binary(max_size=300))
def test_any_values_of_any_message_arrive_as_they_were_sent(message: Message, payload: bytes) -> None:
    arrived, received = decode(frames_of(message, payload))
    assert arrived == message
    assert received.tobytes() == payload


def test_not_a_number_and_infinity_are_refused_where_seconds_belong() -> None:
    for seconds in (float("nan"), float("inf"), float("-inf"), -1.0):
        assert "seconds" in refused(frames_of(m.LeafAnswer(SESSION, 1, 1, 0, 0, 1, seconds, 0)))


def test_not_a_number_and_infinity_arrive_as_inputs_of_rows() -> None:
    values = (float("inf"), float("-inf"))
    sent = m.LeafRows(SESSION, 1, 1, 0, 1, (1, 2), (7, 7), {"logps": values})
    assert decode(frames_of(sent))[0] == sent


def test_the_payload_is_not_copied() -> None:
    payload = bytearray(b"before")
    _, received = decode(encode(m.VectorBlock(SESSION, 1, 0), payload))
    payload[:] = b"after!"
    assert bytes(received) == b"after!"


def test_a_payload_of_floats_counts_in_bytes() -> None:
    floats = memoryview(struct.pack("<4f", 1, 2, 3, 4)).cast("f")
    _, received = decode(encode(m.VectorBlock(SESSION, 1, 0), floats))
    assert received.nbytes == 16


# ---- cut, grown, swapped, missing, doubled


@each_example
def test_every_frame_truncation_is_refused(message: Message) -> None:
    whole = frames_of(message, PAYLOAD)
    for place, frame in enumerate(whole):
        for size in range(len(frame)):
            refused([*whole[:place], frame[:size], *whole[place + 1 :]])


@each_example
def test_trailing_bytes_of_any_frame_are_refused(message: Message) -> None:
    whole = frames_of(message, PAYLOAD)
    for place, frame in enumerate(whole):
        for tail in (b"\x00", b"\xc0", b"\xff", frame):
            refused([*whole[:place], frame + tail, *whole[place + 1 :]])


@each_example
def test_frames_missing_doubled_or_swapped_are_refused(message: Message) -> None:
    preamble, header, payload = frames_of(message, PAYLOAD)
    for wrong in (
        [],
        [preamble],
        [preamble, header],
        [preamble, payload],
        [header, payload],
        [preamble, header, payload, payload],
        [preamble, preamble, header, payload],
        [preamble, header, header, payload],
        [header, preamble, payload],
        [preamble, payload, header],
        [payload, header, preamble],
        [b"", b"", b""],
        [preamble + header + payload],
    ):
        refused(wrong)


@each_example
def test_every_bit_of_the_preamble_counts(message: Message) -> None:
    preamble, header, payload = frames_of(message, PAYLOAD)
    for bit in range(8 * len(preamble)):
        flipped = bytearray(preamble)
        flipped[bit // 8] ^= 1 << bit % 8
        refused([flipped, header, payload])


def test_another_magic_or_reserved_bits_are_not_ours() -> None:
    _, header, payload = frames_of(EXAMPLES[0])
    for preamble in (PREAMBLE.pack(b"mlxe", PROTOCOL_VERSION, 0, 0), PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, 1, 0)):
        assert refused([preamble, header, payload]) == "not a message of mlxdist"


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
def test_another_protocol_version_is_refused_with_both_numbers(version: int) -> None:
    sentence = refused([PREAMBLE.pack(MAGIC, version, 0, 0), b"", b""])
    assert f"version {version}" in sentence
    assert f"speaks {PROTOCOL_VERSION}" in sentence
    assert "install" in sentence


# ---- headers


@each_example
def test_an_unknown_field_is_refused(message: Message) -> None:
    assert "unknown field" in refused(with_header(header_of({**as_map(message), "surprise": 1})))


@each_example
def test_a_missing_field_is_refused_unless_it_has_a_default(message: Message) -> None:
    fields = as_map(message)
    optional = {field.name for field in msgspec.structs.fields(message) if not field.required}
    for name in fields.keys() - optional - {"type"}:
        rest = {key: value for key, value in fields.items() if key != name}
        assert name in refused(with_header(header_of(rest)))


@each_example
def test_a_field_of_another_type_is_refused(message: Message) -> None:
    fields = as_map(message)
    for name, hint in hints(type(message)).items():
        wrong: list[Any] = [None, b"bytes", [[]], {"a": None}, msgspec.msgpack.Ext(5, b"x")]
        wrong += [
            value for value in ("7", 7, 0.5, True) if type(value) is not hint and not (hint is float and value == 7)
        ]
        for value in wrong:
            refused(with_header(header_of({**fields, name: value})))


@each_example
def test_a_session_with_more_or_fewer_parts_is_refused(message: Message) -> None:
    fields = as_map(message)
    if "session" in fields:
        for other in ([], ["run"], ["run", 1], ["run", 1, 2, 3], {"run": "run", "incarnation": 1, "number": 2}):
            refused(with_header(header_of({**fields, "session": other})))


@pytest.mark.parametrize("tag", ["", "Message", "hello", "Hello ", "Hallo", "SessionId", "RunSpec", None, 1, ["Hello"]])
def test_an_unknown_type_is_refused(tag: Any) -> None:
    refused(with_header(header_of({**as_map(m.Shutdown(SESSION, "over")), "type": tag})))


def test_a_header_without_a_type_is_refused() -> None:
    fields = as_map(m.Shutdown(SESSION, "over"))
    del fields["type"]
    assert "type" in refused(with_header(header_of(fields)))


@pytest.mark.parametrize("value", [None, True, 1, 0.5, "Hello", b"Hello", [], {}, [{}], {"type": {}}])
def test_a_header_that_is_no_message_is_refused(value: Any) -> None:
    refused(with_header(msgspec.msgpack.encode(value)))


@pytest.mark.parametrize("code", [-128, -1, 0, 5, 127])
def test_extension_types_are_refused_wherever_they_stand(code: int) -> None:
    for size in (0, 1, 4, 8, 12, 300):
        ext = msgspec.msgpack.Ext(code, bytes(size))
        refused(with_header(msgspec.msgpack.encode(ext)))
        refused(with_header(header_of({**as_map(m.Shutdown(SESSION, "over")), "reason": ext})))
        refused(with_header(header_of({"first": ext, **as_map(m.Shutdown(SESSION, "over"))})))


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\x82\xa1a\xc0\xa1b"])
@pytest.mark.parametrize("depth", [50, 100_000])
def test_deep_nesting_is_refused(opener: bytes, depth: int) -> None:
    deep = opener * depth + b"\xc0"
    refused(with_header(deep))
    refused(with_header(b"\x82\xa5first" + deep + b"\xa4type\xa3Bye"))
    session = msgspec.msgpack.encode(SESSION)
    refused(with_header(b"\x83\xa4type\xa8Shutdown\xa7session" + session + b"\xa6reason" + deep))


@pytest.mark.parametrize(
    "announced", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_an_announced_size_reserves_no_memory(announced: bytes) -> None:
    refused(with_header(announced))
    refused(with_header(b"\x82\xa4type\xa3Log\xa5lines" + announced))
    refused(with_header(b"\x82\xa5first" + announced))


def test_text_that_is_no_utf8_is_refused() -> None:
    refused(
        with_header(frames_of(m.Reject("reason"))[1].replace(b"\xa6reason\xa6reason", b"\xa6reason\xa6reas\xff\xfe"))
    )


def test_numbers_beyond_64_bits_are_not_sent() -> None:
    with pytest.raises(OverflowError):
        encode(m.Heartbeat(SESSION, 2**64))


# ---- sizes


def test_a_header_or_payload_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match="Reject is too large"):
        encode(m.Reject("x" * MAX_HEADER))
    with pytest.raises(WireError, match="VectorBlock is too large"):
        encode(m.VectorBlock(SESSION, 1, 0), bytes(MAX_PAYLOAD + 1))


def test_a_header_or_payload_over_the_limit_is_refused() -> None:
    huge = b"\xda" + bytes(MAX_HEADER)
    assert "exceed" in refused([PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, 0, 0), huge, b""])
    large = bytes(MAX_PAYLOAD + 1)
    assert "exceed" in refused(
        [PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, 0, len(large)), frames_of(EXAMPLES[0])[1], large]
    )


def test_the_largest_messages_arrive() -> None:
    inputs = {str(place): (0.5,) * limits.MOST_ROWS for place in range(6)}
    rows = (2**31,) * limits.MOST_ROWS
    sent = m.LeafRows(SESSION, 1, 1, 0, 1, rows, (7,) * limits.MOST_ROWS, inputs)
    assert MAX_HEADER * 0.9 < len(encode(sent)[1]) <= MAX_HEADER
    message, payload = decode(encode(sent, bytes(MAX_PAYLOAD)))
    assert message == sent
    assert payload.nbytes == MAX_PAYLOAD


@each_example
def test_every_text_number_and_list_has_a_limit(message: Message) -> None:
    """One step past any reasonable amount is refused, wherever it stands, and the refusal is short."""
    huge: dict[type, list[Any]] = {
        str: ["x" * 10_000],
        int: [-(2**62), 2**63],
        float: [-1e301, float("inf"), float("nan")],
        list: [["x"] * 100_001, [1] * 100_001],
        dict: [{str(key): "1" for key in range(1000)}],
    }
    fields = as_map(message)
    for name, value in fields.items():
        for wrong in huge.get(type(value), []) if name not in ("seed", "type") else []:
            assert len(refused(with_header(header_of({**fields, name: wrong})))) < 300


def test_a_sentence_that_is_too_long_is_cut_by_its_sender() -> None:
    log = m.Log(SESSION, ("x" * 10_000,) * 1000)
    for message in (m.Reject("x" * 100_000), m.Fault(SESSION, "error", "y" * 10_000), log):
        arrived, _ = decode(encode(fitted(message)))
        assert type(arrived) is type(message)
    assert fitted(m.Reject("short")) == m.Reject("short")


# ---- noise


def never_anything_but_a_wire_error(frames: Sequence[bytes]) -> bool:
    """True if the frames were accepted; any other exception fails the test."""
    try:
        message, _ = decode(frames)
    except WireError:
        return False
    assert isinstance(message, Message)
    return True


@settings(max_examples=1000)
@given(st.binary(max_size=120))
def test_random_headers_are_refused(header: bytes) -> None:
    assert not never_anything_but_a_wire_error(with_header(header))


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    assert not never_anything_but_a_wire_error(frames)


@settings(max_examples=400)
@given(ANY_MESSAGE, st.data())
def test_a_damaged_header_is_refused_or_is_another_message(message: Message, data: st.DataObject) -> None:
    header = bytearray(frames_of(message)[1])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(header) - 1))
        match data.draw(st.sampled_from(["change", "drop", "insert", "repeat"])):
            case "change":
                header[place] = data.draw(st.integers(0, 255))
            case "drop" if len(header) > 1:
                del header[place]
            case "insert":
                header.insert(place, data.draw(st.integers(0, 255)))
            case _:
                header[place:place] = header[place : place + 8]
    never_anything_but_a_wire_error(with_header(bytes(header)))


@settings(max_examples=500)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(MESSAGE_TYPES),
)
def test_any_msgpack_value_in_the_place_of_a_field_is_checked(value: Any, kind: type[Message]) -> None:
    sample = next(one for one in EXAMPLES if type(one) is kind)
    for name in as_map(sample):
        never_anything_but_a_wire_error(with_header(header_of({**as_map(sample), name: value})))


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("something was unpickled",)


def test_nothing_is_unpickled() -> None:
    for level in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(Bomb(), protocol=level)
        preamble, header, _ = frames_of(EXAMPLES[0], pickled)
        refused([preamble, pickled, pickled])
        refused([pickled, header, pickled])
        refused(with_header(msgspec.msgpack.encode(pickled)))
        for message in EXAMPLES:
            for name in as_map(message):
                refused(with_header(header_of({**as_map(message), name: pickled})))
        assert decode([preamble, header, pickled])[1].tobytes() == pickled
    assert not {"pickle", "marshal", "shelve"} & set(vars(wire))
