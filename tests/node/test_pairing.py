"""Places that a person types, and names that a Mac can have as a node."""

import pytest

from mlxdist.node.pairing import Place, node_name, place_of
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import NODE_NAME


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("mini-1.local", Place("mini-1.local")),
        ("mini-1.local:7553", Place("mini-1.local", 7553)),
        ("192.0.2.7", Place("192.0.2.7")),
        ("fe80::1%en0", Place("fe80::1%en0")),
        ("[fe80::1%en0]:7553", Place("fe80::1%en0", 7553)),
        ("[::1]", Place("::1")),
    ],
)
def test_a_place_is_read_and_written_as_people_type_it(text: str, place: Place) -> None:
    assert place_of(text) == place
    assert place_of(str(place)) == place


@pytest.mark.parametrize("text", ["", ":7550", "mini:port", "mini:70000", "http://mini", "two words", "[::1"])
def test_another_text_is_no_place(text: str) -> None:
    with pytest.raises(UserError, match="is no address"):
        place_of(text)


@pytest.mark.parametrize("name", ["Annas MacBook Pro", "büro", "..", "", "x" * 300, "-rf", "mini-1"])
def test_every_mac_has_a_name_as_a_node(name: str) -> None:
    assert NODE_NAME.fullmatch(node_name(name))
