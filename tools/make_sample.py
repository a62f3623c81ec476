#!/usr/bin/env python3
"""Make a synthetic image set in the layout of Google Landmark Recognition 2020.

    make_sample.py --images 3000 --seed 0 --out DIR

writes DIR/train.csv (`id,landmark_id`) and DIR/train/a/b/c/<id>.jpg: photo-like JPEGs of 50 to 100 KB,
whose labels have the long tail of the real set.  The same options give the same files, byte for byte, with
one version of OpenCV; a finished DIR is left as it is, an interrupted one is made again from the start.

Photo-like means that size and decoding time are those of a photograph: the spectrum falls off as 1/f, as it
does in natural images, over a sky-like gradient and a few hard-edged shapes.  Plain noise would be three
times as large, flat colours would decode in a third of the time.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

FORMAT = 1  # raise it when the same options give other files
SIZE_RANGE = (50_000, 100_000)  # bytes of one file
SHAPES = ((480, 640), (427, 640), (640, 480), (480, 600), (360, 640), (512, 512))  # height, width in pixels
TEXTURES, TEXTURE_SIDE = 12, 1024
MARKER = "sample.json"


class Refused(Exception):
    """The folder holds something else."""


def main() -> int:
    """Parse the command line, make the sample, say what was done."""
    parser = argparse.ArgumentParser(description="Make a synthetic image set in the Kaggle layout.")
    parser.add_argument("--images", type=int, default=3000, help="how many (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other images (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    options = parser.parse_args()
    if options.images < 1 or options.seed < 0:
        parser.error(f"--images must be 1 or more and --seed 0 or more, got {options.images} and {options.seed}")
    try:
        made = make_sample(options.out, images=options.images, seed=options.seed)
    except (Refused, OSError) as error:
        print(f"make_sample: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {options.images} images, {'made' if made else 'already there'}")
    return 0


def make_sample(out: Path, *, images: int, seed: int) -> bool:
    """Write the sample into `out`; False when it was there already."""
    wanted = {"format": FORMAT, "images": images, "seed": seed}
    marker = out / MARKER
    if marker.exists():
        found = json.loads(marker.read_text())
        complete = found.pop("complete")
        if found != wanted:
            raise Refused(f"{out} holds another sample ({found}, asked for {wanted}); choose another --out")
        if complete:
            return False
    elif out.exists() and any(out.iterdir()):
        raise Refused(f"{out} isn't empty and wasn't made by this program; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({**wanted, "complete": False}))
    ids = image_ids(images, seed)
    write_images(out, ids, seed)
    write_csv(out / "train.csv", ids, landmark_labels(images, seed))
    marker.write_text(json.dumps({**wanted, "complete": True}))
    return True


def image_ids(images: int, seed: int) -> list[str]:
    """Return distinct ids of 16 hexadecimal digits, in no order."""
    return [hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=8).hexdigest() for i in range(images)]


def landmark_labels(images: int, seed: int) -> np.ndarray:
    """Draw labels, (images,) int64: few landmarks with many photos, many with a handful.

    The real set has 81,313 landmarks for 1.58 million photos, 20 a landmark; so has this one, with the
    frequencies of a Zipf law.
    """
    rng = np.random.default_rng((seed, images))
    classes = max(2, images // 20)
    numbers = rng.choice(203_094, size=classes, replace=False)
    weights = 1.0 / np.arange(1, classes + 1)
    return np.sort(numbers)[rng.choice(classes, size=images, p=weights / weights.sum())]


def write_csv(path: Path, ids: list[str], labels: np.ndarray) -> None:
    """Write `id,landmark_id` in the order of the labels, as Kaggle's file is sorted."""
    rows = sorted(zip(labels.tolist(), ids, strict=True))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "landmark_id"))
        writer.writerows((name, label) for label, name in rows)


def write_images(out: Path, ids: list[str], seed: int) -> None:
    """Draw, encode and write all images, one thread a core."""
    cv2.setNumThreads(1)  # the threads below share the cores already
    textures = list(noise_textures(seed))
    for folder in {name[:3] for name in ids}:
        (out / "train" / folder[0] / folder[1] / folder[2]).mkdir(parents=True, exist_ok=True)

    def write_one(job: tuple[int, str]) -> None:
        index, name = job
        data = photo_like(np.random.default_rng((seed, index)), textures)
        (out / "train" / name[0] / name[1] / name[2] / f"{name}.jpg").write_bytes(data)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(write_one, enumerate(ids)):
            pass


def noise_textures(seed: int) -> Iterator[np.ndarray]:
    """Yield int8 squares whose amplitude spectrum falls as 1/f, of standard deviation 32.

    They are made once and cropped for every image: a Fourier transform for each would take longer than all
    the rest.
    """
    frequencies = np.hypot(np.fft.fftfreq(TEXTURE_SIDE)[:, None], np.fft.rfftfreq(TEXTURE_SIDE)[None, :])
    frequencies[0, 0] = np.inf
    for number in range(TEXTURES):
        white = np.random.default_rng((seed, number, 1)).standard_normal((TEXTURE_SIDE, TEXTURE_SIDE))
        pink = np.fft.irfft2(np.fft.rfft2(white) / frequencies, s=white.shape)
        yield np.clip(pink * (32 / pink.std()), -127, 127).astype(np.int8)


def photo_like(rng: np.random.Generator, textures: list[np.ndarray]) -> bytes:
    """Draw one image and encode it into `SIZE_RANGE`.

    The quality is corrected from the size that the first attempt had: one or two encodings an image.
    """
    image = draw(rng, SHAPES[rng.integers(len(SHAPES))], textures)
    target = int(rng.integers(60_000, 92_000))
    quality, data = 80, b""
    for _ in range(6):
        data = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1].tobytes()
        if SIZE_RANGE[0] <= len(data) <= SIZE_RANGE[1] and 0.9 < len(data) / target < 1.1:
            break
        # near 90 a step of quality is worth about 6 % of the size
        quality = int(np.clip(quality + round(np.log(target / len(data)) / 0.06), 40, 98))
    return data


def draw(rng: np.random.Generator, shape: tuple[int, int], textures: list[np.ndarray]) -> np.ndarray:
    """Return one image, (height, width, 3) uint8: gradient, shapes, then structure at every scale."""
    image = gradient(rng, shape)
    for _ in range(rng.integers(4, 12)):
        draw_shape(rng, image)
    luma = crop(rng, textures, shape).astype(np.int16)
    chroma = crop(rng, textures, shape).astype(np.int16) // 3
    noisy = image.astype(np.int16)
    noisy += luma[:, :, None]
    noisy[:, :, 0] += chroma
    noisy[:, :, 2] -= chroma
    return np.clip(noisy, 0, 255).astype(np.uint8)


def gradient(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return a smooth background between four random corner colours."""
    corners = rng.integers(30, 226, (2, 2, 3), dtype=np.uint8)
    return cv2.resize(corners, (shape[1], shape[0]), interpolation=cv2.INTER_LINEAR)


def draw_shape(rng: np.random.Generator, image: np.ndarray) -> None:
    """Draw a filled polygon or ellipse, like a wall or a dome, onto the image."""
    height, width = image.shape[:2]
    colour = [int(value) for value in rng.integers(20, 236, 3)]
    centre = rng.integers((0, 0), (width, height))
    if rng.random() < 0.6:
        corners = centre + rng.integers(-160, 161, (int(rng.integers(3, 7)), 2))
        cv2.fillPoly(image, [cv2.convexHull(corners.astype(np.int32))], colour, cv2.LINE_AA)
    else:
        axes = (int(rng.integers(10, 140)), int(rng.integers(10, 140)))
        point = (int(centre[0]), int(centre[1]))
        cv2.ellipse(image, point, axes, float(rng.uniform(0, 180)), 0, 360, colour, -1, cv2.LINE_AA)


def crop(rng: np.random.Generator, textures: list[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Cut a random piece out of a random texture, mirrored half of the time."""
    texture = textures[rng.integers(len(textures))]
    top, left = rng.integers(0, TEXTURE_SIDE - np.array(shape))
    piece = texture[top : top + shape[0], left : left + shape[1]]
    return piece[:, ::-1] if rng.random() < 0.5 else piece


if __name__ == "__main__":
    sys.exit(main())
