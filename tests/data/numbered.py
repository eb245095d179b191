"""Images that tell their number: all pixels of image i are 6·i."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import small_sources as small
from PIL import Image


SIDE = 8


def image(number):
    return np.full((SIDE, SIDE, 3), 6 * number, np.uint8)


def write(path, *names):
    """The image whose number is the last number in each file's name."""
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image(int(re.findall(r"\d+", name)[-1]))).save(file)


def rows(path, file, numbers, values=None, **columns):
    encoded = [small.png(image(number)) for number in numbers]
    values = [number % 2 for number in numbers] if values is None else values
    columns = columns or {"image": encoded, "label": values}
    file = path / file
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        small.write_arrow(file, table, stream=file.suffix == ".arrow")
