"""Shapes as pixels: in their place, with sharp or smooth edges, and letters with a font that has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from finetune.errors import RequestError
from finetune.report import png
from finetune.report.png import HEAD, MARGIN, SCALE, write_png
from finetune.report.shapes import DAY, Box, Dot, Line, Picture, Shape, Word

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def drawn(folder: Path, *shapes: Shape) -> Image.Image:
    """The shapes on a picture without a title, 100 x 100 pixels, cut to it."""
    write_png(folder / "shapes.png", [Picture("", "", 100, 100, list(shapes))])
    with Image.open(folder / "shapes.png") as image:
        left, top = round(MARGIN * SCALE), round(HEAD * SCALE)
        return image.crop((left, top, left + round(100 * SCALE), top + round(100 * SCALE)))


def at(image: Image.Image, x: float, y: float) -> tuple[int, ...]:
    found = image.getpixel((round(x * SCALE), round(y * SCALE)))
    assert isinstance(found, tuple)
    return found


def inked(image: Image.Image) -> int:
    """The pixels that are not white."""
    return sum(number for number, colour in image.getcolors(1 << 20) or () if colour != WHITE)


def test_a_box_fills_its_place_alone_and_what_is_below_shines_through(tmp_path: Path) -> None:
    assert inked(drawn(tmp_path, Box(4, 2, 40, 40, "#000000"))) == (40 * SCALE) ** 2
    image = drawn(tmp_path, Box(0, 0, 40, 40, "#000000"), Box(20, 20, 40, 40, "#ffffff", opacity=0.5))
    assert [at(image, x, x) for x in (1, 19, 41, 59)] == [BLACK, BLACK, WHITE, WHITE]
    assert at(image, 30, 30) == pytest.approx((128, 128, 128), abs=1)


def test_a_box_or_a_line_of_less_than_a_pixel_is_seen(tmp_path: Path) -> None:
    assert inked(drawn(tmp_path, Box(50, 50, 0.01, 0.01, "#000000"))) == 1
    assert inked(drawn(tmp_path, Line(((0, 50), (80, 50)), "#000000", width=0.1))) == 80 * SCALE


def test_a_straight_line_is_sharp_a_slanted_one_smooth_and_one_without_length_is_not_there(tmp_path: Path) -> None:
    for ends in (((10, 50), (90, 50)), ((50, 10), (50, 90))):
        image = drawn(tmp_path, Line(ends, "#000000", width=2))
        assert {colour for _, colour in image.getcolors() or ()} == {WHITE, BLACK}
        assert inked(image) == 80 * SCALE * round(2 * SCALE)
        assert at(image, 50, 50) == BLACK
    slanted = drawn(tmp_path, Line(((10, 10), (90, 70)), "#000000", width=2))
    assert len(slanted.getcolors() or ()) > 3
    assert at(slanted, 50, 40) == BLACK
    assert inked(drawn(tmp_path, Line(((50, 50), (50, 50)), "#000000"))) == 0


def test_a_dashed_line_has_gaps_as_in_svg_round_a_corner_too(tmp_path: Path) -> None:
    image = drawn(tmp_path, Line(((0, 50), (46, 50), (46, 90)), "#000000", width=4, dashed=True))
    for along in range(0, 80, 9):  # 5 pixels of line, 4 without
        for pixel, is_dash in ((2.5, True), (7.0, False)):
            place = min(along + pixel, 46.0), 50 + max(along + pixel - 46, 0.0)
            assert (at(image, *place) == BLACK) == is_dash, (along, pixel)


def test_a_band_is_filled_and_faint(tmp_path: Path) -> None:
    band = Line(((10, 10), (90, 10), (90, 90), (10, 90)), "#000000", opacity=0.25, filled=True)
    image = drawn(tmp_path, band)
    assert at(image, 50, 50) == pytest.approx((191, 191, 191), abs=1)
    assert at(image, 95, 50) == WHITE


def test_a_dot_is_round_and_a_hollow_one_a_ring(tmp_path: Path) -> None:
    full, ring = (drawn(tmp_path, Dot(50, 50, "#000000", "", 10, hollow)) for hollow in (False, True))
    assert (at(full, 50, 50), at(ring, 50, 50)) == (BLACK, WHITE)
    for image in (full, ring):
        assert at(image, 59.9, 50) == BLACK
        assert at(image, 58.5, 58.5) == WHITE  # the corner of its square
    assert inked(full) == pytest.approx(3.14 * (10.75 * SCALE) ** 2, rel=0.1)


def test_a_word_stands_at_its_anchor_and_bold_is_heavier(tmp_path: Path) -> None:
    for anchor, left, right in (("start", 50, 74), ("middle", 38, 62), ("end", 26, 50)):
        box = drawn(tmp_path, Word(50, 50, "word", anchor, "#000000", bold=False)).convert("L").point(
            [255 - shade for shade in range(256)]
        ).getbbox()  # fmt: skip
        assert box is not None
        assert (box[0] / SCALE, box[2] / SCALE, box[3] / SCALE) == pytest.approx((left, right, 50), abs=4)
    thin, bold = (inked(drawn(tmp_path, Word(0, 50, "word", bold=bold))) for bold in (False, True))
    assert bold > 1.1 * thin


def test_a_name_that_is_hostile_is_drawn_on_one_line(tmp_path: Path) -> None:
    assert inked(drawn(tmp_path, Word(0, 50, "$\\frac{$\n\x1b[2J\x00\ud800", "end"), Word(0, 20, ""))) == 0
    assert inked(drawn(tmp_path, Word(0, 50, "$\\frac{$\n\x1b[2J\x00\ud800"))) > 100


def test_letters_that_the_own_font_lacks_come_from_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STIX, which matplotlib brings, stands for a font of the machine; DejaVu Sans lacks the letter."""
    looks = {}
    for names in ((), ("No Such Font", "STIXGeneral")):
        monkeypatch.setattr(png, "MORE_FONTS", names)
        png._more_fonts.cache_clear()
        looks[names] = {text: drawn(tmp_path, Word(5, 50, text)).tobytes() for text in ("word \xe4", "word \u2322")}
    png._more_fonts.cache_clear()
    without, with_more = looks.values()
    assert without["word \xe4"] == with_more["word \xe4"]
    assert without["word \u2322"] != with_more["word \u2322"]


def test_colours_are_those_of_the_page_by_day(tmp_path: Path) -> None:
    image = drawn(tmp_path, Box(0, 0, 100, 100, "accent"))
    assert "#{:02x}{:02x}{:02x}".format(*at(image, 50, 50)) == DAY["accent"]


def test_a_path_that_cannot_be_written_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere/shapes\.png: cannot be written"):
        drawn(tmp_path / "nowhere")


def test_drawing_imports_no_matplotlib(tmp_path: Path) -> None:
    """A run would wait for it at its end."""
    look = (
        "import sys\nfrom pathlib import Path\nfrom finetune.report.png import write_png\n"
        "from finetune.report.shapes import Picture, Word\n"
        "write_png(Path(sys.argv[1]), [Picture('Loss', '', 100, 100, [Word(0, 50, 'na\\xefve \\u2264 \\u03b1')])])\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    command = [sys.executable, "-c", look, str(tmp_path / "picture.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
