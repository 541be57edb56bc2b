"""A picture's shapes as PNG, through Pillow: importing matplotlib and drawing with it takes most of the time between a
short run's last step and its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from finetune.errors import RequestError, plain
from finetune.report.shapes import DASH, DAY, RING, SPACE, Box, Dot, Line, Picture, Point, Shape, Word

PIXELS_PER_INCH, PNG_DOTS_PER_INCH = 96, 180
SCALE = PNG_DOTS_PER_INCH / PIXELS_PER_INCH
FINE = 4  # slanted and round edges are drawn at so many times the resolution, then reduced
MARGIN, HEAD, GAP = 20.0, 38.0, 18.0  # around all, for a picture's title, between two pictures
FONTS = "mpl-data/fonts/ttf"  # matplotlib brings DejaVu Sans; finding the file imports nothing
# Fonts with letters that DejaVu Sans lacks, tried in this order if installed.
MORE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Noto Sans Arabic", "Noto Sans Devanagari")
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
NO_LETTER = "\U0010ffff"  # never in a font, so it shows what a font draws for a letter that it lacks


def write_png(path: Path, pictures: Sequence[Picture], words: Sequence[Word] = ()) -> None:
    """Write the pictures one below the other, in light mode, below `words`. Raises RequestError if it cannot."""
    wide, y = max(picture.width for picture in pictures), max((word.y for word in words), default=0.0)
    height = y + sum(HEAD + picture.height + GAP for picture in pictures) + MARGIN
    image = Image.new("RGB", (int((wide + 2 * MARGIN) * SCALE), int(height * SCALE)), DAY["ground"])
    _paint(image, words, 0)
    for picture in pictures:
        _paint(image, [Word(0, y + 24, picture.title, size=14, bold=True)], 0)
        _paint(image, picture.shapes, y + HEAD)
        y += HEAD + picture.height + GAP
    try:
        image.save(path, format="png", dpi=(PNG_DOTS_PER_INCH, PNG_DOTS_PER_INCH))
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def _paint(image: Image.Image, shapes: Sequence[Shape], down: float) -> None:
    """Paint on top, shifted down by `down`."""

    def place(x: float, y: float) -> Point:
        return (x + MARGIN) * SCALE, (y + down) * SCALE

    for shape in shapes:
        colour = DAY.get(shape.colour, shape.colour)
        if isinstance(shape, Box):
            (left, top), (right, bottom) = place(shape.x, shape.y), place(shape.x + shape.width, shape.y + shape.height)
            _fill(image, (round(left), round(top)), (round(right), round(bottom)), colour, shape.opacity)
        elif isinstance(shape, Line):
            _line(image, shape, [place(*point) for point in shape.points], colour)
        elif isinstance(shape, Dot):
            _dot(image, shape, place(shape.x, shape.y), colour)
        else:
            _word(image, shape, place(shape.x, shape.y), colour)


def _fill(image: Image.Image, start: tuple[int, int], end: tuple[int, int], colour: str, opacity: float) -> None:
    """Fill whole pixels, so that edges are sharp, and at least one."""
    size = max(end[0] - start[0], 1), max(end[1] - start[1], 1)
    image.paste(colour, start, Image.new("L", size, round(255 * opacity)))


def _line(image: Image.Image, line: Line, points: Sequence[Point], colour: str) -> None:
    width = line.width * SCALE
    across, down = ({point[axis] for point in points} for axis in (0, 1))
    if len(across) == len(down) == 1:
        return  # it has no length
    if min(len(across), len(down)) == 1 and not (line.filled or line.dashed):  # such as a grid's: sharp
        half, thick = width / 2, round(width)
        left, top = round(min(across) - half * (len(across) == 1)), round(min(down) - half * (len(down) == 1))
        right = left + thick if len(across) == 1 else round(max(across))
        bottom = top + thick if len(down) == 1 else round(max(down))
        _fill(image, (left, top), (right, bottom), colour, line.opacity)
        return

    with _fine_mask(image, points, width, colour, line.opacity) as (mask, fine):
        if line.filled:
            mask.polygon(fine, fill=255)
            return
        for piece in _dashes(fine) if line.dashed else (fine,):
            mask.line(piece, fill=255, width=max(round(width * FINE), 1), joint="curve")


def _dashes(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """A line's dashes, on a fine mask."""
    dash, space = DASH * SCALE * FINE, SPACE * SCALE * FINE
    piece, left, is_dash = [points[0]], dash, True
    for start, end in pairwise(points):
        length, done = math.dist(start, end), 0.0
        while length - done > left:
            done += left
            share = done / length
            corner = start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])
            if is_dash:
                yield [*piece, corner]
            piece, is_dash = [corner], not is_dash
            left = dash if is_dash else space
        left -= length - done
        piece.append(end)
    if is_dash:
        yield piece


def _dot(image: Image.Image, dot: Dot, centre: Point, colour: str) -> None:
    radius = (dot.radius + RING / 2) * SCALE
    with _fine_mask(image, [centre], radius, colour) as (mask, ((x, y),)):
        beyond, ring = radius * FINE, round(RING * SCALE * FINE)
        around = (x - beyond, y - beyond, x + beyond, y + beyond)
        mask.ellipse(around, fill=0 if dot.hollow else 255, outline=255, width=ring)


@contextmanager
def _fine_mask(image: Image.Image, points: Sequence[Point], room: float, colour: str,
               opacity: float = 1.0) -> Iterator[tuple[ImageDraw.ImageDraw, Sequence[Point]]]:  # fmt: skip
    """Yields a fine mask with `room` around the points, and the points on it; then paints what was drawn in white."""
    (left, right), (top, bottom) = (
        (math.floor(min(values) - room), math.ceil(max(values) + room)) for values in zip(*points, strict=True)
    )
    mask = Image.new("L", ((right - left) * FINE, (bottom - top) * FINE))
    yield ImageDraw.Draw(mask), [((x - left) * FINE, (y - top) * FINE) for x, y in points]
    image.paste(colour, (left, top), mask.reduce(FINE).point([round(shade * opacity) for shade in range(256)]))


def _word(image: Image.Image, word: Word, start: Point, colour: str) -> None:
    pieces = list(_in_fonts(plain(word.text), word.size * SCALE, word.bold))
    lengths = [font.getlength(text) for text, font in pieces]
    x = start[0] - sum(lengths) * {"start": 0.0, "middle": 0.5, "end": 1.0}[word.anchor]
    for (text, font), length in zip(pieces, lengths, strict=True):
        ImageDraw.Draw(image).text((x, start[1]), text, colour, font, anchor="ls")
        x += length


def _in_fonts(text: str, size: float, is_bold: bool) -> Iterator[tuple[str, Font]]:
    """Parts of the text, each with a font that has its letters, if one is installed."""
    own = _font(str(_own_font(is_bold)), 0, size)
    if text.isascii() or all(_has(own, letter) for letter in text):
        yield text, own
        return
    fonts = [own, *(_font(*found, size) for found in _more_fonts())]
    for place, letters in groupby(text, lambda letter: next((i for i, f in enumerate(fonts) if _has(f, letter)), 0)):
        yield "".join(letters), fonts[place]


@cache
def _font(file: str, index: int, size: float) -> Font:
    try:
        return ImageFont.truetype(file, size, index)
    except OSError:  # a distribution keeps matplotlib's data elsewhere
        return ImageFont.load_default(size)


@cache
def _has(font: Font, letter: str) -> bool:
    return letter.isspace() or bytes(font.getmask(letter)) != bytes(font.getmask(NO_LETTER))


@cache
def _own_font(is_bold: bool) -> Path:
    spec = find_spec("matplotlib")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / FONTS / f"DejaVuSans{'-Bold' * is_bold}.ttf"


@cache
def _more_fonts() -> Sequence[tuple[str, int]]:
    """Files, and places in them. Only for a text that DejaVu Sans cannot show, as it imports matplotlib."""
    from matplotlib.font_manager import findfont

    found = []
    for name in MORE_FONTS:
        with suppress(ValueError):  # it is not installed
            path = findfont(name, fallback_to_default=False)
            found.append((str(path), int(getattr(path, "face_index", 0))))  # before 3.11, always the first
    return found
