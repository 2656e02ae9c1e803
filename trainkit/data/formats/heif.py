"""HEIC images through pillow-heif, where it is installed (extra `heic`)."""

from __future__ import annotations

from trainkit.errors import UserError

SUFFIXES = frozenset({".heic", ".heif"})
FORMATS = ("HEIF",)
"""Pillow's name of the format once `prepare` was called."""

_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


def is_heif(data: bytes) -> bool:
    """Return True for data that begins as a HEIC file does."""
    return data[4:8] == b"ftyp" and data[8:12] in _BRANDS


def prepare(where: str) -> None:
    """Let Pillow open HEIC images. Raises UserError naming `where` and the extra without pillow-heif."""
    from PIL import Image

    if FORMATS[0] in Image.OPEN:
        return
    try:
        import pillow_heif  # pyright: ignore[reportMissingImports]
    except ImportError:
        expected = "pillow-heif, which reads them, to be installed"
        remedy = 'pip install "trainkit[heic]", or save them as JPEG or PNG'
        raise UserError(where, "a HEIC image", expected, remedy) from None
    # Thumbnails and depth images that come with a photograph are not asked for.
    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
