"""Charts are well-formed SVG whose lines lie inside their frame."""

import xml.etree.ElementTree as ET

from elasticmoe.runtime.simulator.svg import HEIGHT, WIDTH, chart, stack, thin


def parse(*charts: str) -> ET.Element:
    """Return the document of these charts."""
    return ET.fromstring(stack(charts))  # noqa: S314  # our own text


def test_lines_fill_their_frame() -> None:
    """The largest y is at the top of the frame, zero at its bottom, x from edge to edge."""
    document = parse(chart("t", {"a": [(0, 0), (10, 5)]}))
    line = document.find(".//{*}polyline")
    frame = document.find(".//{*}rect")
    assert line is not None
    assert frame is not None
    (x0, y0), (x1, y1) = (tuple(map(float, pair.split(","))) for pair in line.get("points", "").split())
    left, top = float(frame.get("x", 0)), float(frame.get("y", 0))
    assert (x0, y1) == (left, top)
    assert x1 == left + float(frame.get("width", 0))
    assert y0 == top + float(frame.get("height", 0))


def test_names_are_shown_where_there_are_several() -> None:
    """One line needs no name; special characters are escaped."""
    one = parse(chart("t", {"a": [(0, 1)]}))
    two = parse(chart("t <s>", {"a": [(0, 1)], "b & c": [(0, 2)]}))
    assert "a" not in [text.text for text in one.iter("{http://www.w3.org/2000/svg}text")]
    texts = [text.text for text in two.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b & c", "t <s>"} <= set(texts)


def test_charts_stand_below_each_other() -> None:
    """The document is as high as all of them; one without points is an empty frame."""
    document = parse(chart("t", {}), chart("u", {"a": []}))
    assert (document.get("width"), document.get("height")) == (str(WIDTH), str(2 * HEIGHT))


def test_thinning_keeps_the_last_point() -> None:
    """1,000 points become about 300; few stay as they are."""
    points = [(float(n), float(n)) for n in range(1000)]
    assert len(thin(points)) < 340
    assert thin(points)[-1] == points[-1]
    assert thin(points[:3]) == points[:3]
    assert thin([]) == []
