"""Where the time of reading a batch goes: found by what was put in."""

import io
import re
import time

import numpy as np
import pytest
import torch
from PIL import Image
from runs import ROOT

from trainkit.speed import fetch_profile


def function(file: str, body: str, **names):
    """A function that seems to stand in another file."""
    space = {"time": time, **names}
    exec(compile(f"def act():\n    {body}\n", file, "exec"), space)
    return space["act"]


@pytest.mark.parametrize("kind", ["read", "decode", "augment"])
def test_a_slow_part_is_found(kind):
    files = {
        "read": "/x/trainkit/data/storage/image_store.py",
        "decode": "/x/site-packages/PIL/ImageFile.py",
        "augment": "/x/trainkit/data/scenes/augment.py",
    }
    parts = [function(file, f"time.sleep({0.012 if name == kind else 0.002})") for name, file in files.items()]

    def fetch():
        for part in parts:
            part()
        return torch.stack([torch.zeros(4)] * 2)

    shares = fetch_profile.shares([fetch] * 15, 10.0)
    assert set(shares) == set(fetch_profile.KINDS)
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=shares.get) == kind
    assert shares[kind] > 0.5


def test_what_has_no_kind_counts_for_those_that_called_it():
    # As numpy does for whoever calls it; three quarters of its time on behalf of the augmentation.
    library = function("/x/site-packages/numpy/lib/any.py", "time.sleep(0.005)")
    augment = function("/x/trainkit/data/images/augment.py", "[library() for _ in range(3)]", library=library)
    read = function("/x/trainkit/data/formats/recordio.py", "library()", library=library)

    def fetch():
        augment()
        read()

    shares = fetch_profile.shares([fetch] * 15, 10.0)
    # Sleeps last longer where others work; half each is what a library without a caller would be given.
    assert shares["augment"] == pytest.approx(0.75, abs=0.2)
    assert shares["read"] == pytest.approx(0.25, abs=0.2)


def test_pictures_that_are_decoded_are_found_with_the_real_library():
    pixels = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")

    def fetch():
        pictures = [np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB")) for _ in range(4)]
        return torch.stack([torch.from_numpy(picture.copy()) for picture in pictures])

    shares = fetch_profile.shares([fetch] * 15, 10.0)
    assert shares["decode"] > 0.5
    assert shares["read"] < 0.05  # a file in memory is none


def test_what_costs_nothing_has_no_shares():
    assert fetch_profile.shares([], 1.0) == {}


def test_reading_ends_with_the_time_it_has():
    made = []
    fetch_profile.shares((lambda: made.append(time.sleep(0.01)) for _ in range(1000)), 0.03)
    assert 1 <= len(made) <= 4


def test_the_files_that_it_knows_are_there():
    """A file that moves would silently count for another kind."""
    data = ROOT / "trainkit" / "data"
    own = {kind: pattern for pattern, kind in fetch_profile._FUNCTIONS if pattern.startswith("trainkit/")}
    found = {
        kind: {file.relative_to(data).as_posix() for file in data.rglob("*.py") if re.search(pattern, f"{file}:")}
        for kind, pattern in own.items()
    }
    assert found == {
        "augment": {
            "augment.py", "clahe.py", "face_alignment.py", "people/tokenizer.py", "scenes/augment.py",
            "volumes/augment.py", "volumes/augment_intensity.py", "volumes/augment_spatial.py",
        },
        "read": {
            "storage/image_store.py", "scenes/mask_store.py", "volumes/volume_store.py",
            "storage/record_store.py", "rows/reader.py", "volumes/patch_reader.py", "formats/recordio.py", "hub.py",
        },
        "decode": {"formats/image_decode.py", "formats/nifti.py"},
    }  # fmt: skip
